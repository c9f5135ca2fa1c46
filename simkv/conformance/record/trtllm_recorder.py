"""Record the unmodified Python scheduler of TensorRT-LLM on small workloads, step by step.

``SimpleUnifiedScheduler`` and its parts are real: the capacity policies, their block counts, the
micro-batcher and its chunking. Requests and the block manager are stubs (``trtllm_stubs.py``). The
loop here does the work of ``_executor_loop`` and ``_executor_loop_overlap`` of ``py_executor.py``
in the same order, for one rank and a fake model.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator
from typing import Any

from simkv.conformance.decision_trace import FORMAT, DecisionTrace
from simkv.conformance.record.recording_case import RecordingCase
from simkv.core.recording_format import RecordingLine
from simkv.native.trtllm.trtllm_block_stubs import ReusingKvCacheStub
from simkv.native.trtllm.trtllm_stubs import (
    SCHEDULER,
    CapacitySchedulerPolicy,
    KvCacheStub,
    LlmRequestState,
    LlmRequestStub,
)
from simkv.schedulers.trtllm.config import VARIANTS, TrtllmConfig
from simkv.schedulers.trtllm.recording import RECORDING

#: Number of consecutive idle steps after which the case counts as stalled.
MAX_IDLE_STEPS = 100


def record(case: RecordingCase, _: str, name: str) -> DecisionTrace:
    """Record the decisions of TensorRT-LLM's scheduler in a case."""
    variant = case.config.variant
    header = {
        "format": FORMAT,
        "engine": "trtllm",
        "variant": variant,
        "source": VARIANTS[variant].source,
        "case": name,
        "config": RECORDING.knobs(case.config),
        "requests": case.requests,
    }
    header |= {"aborts": case.aborts} if case.aborts else {}
    lines: list[RecordingLine] = []
    closing: RecordingLine | None = None
    try:
        for line in TrtllmDriver(case).lines():
            lines.append(line)  # keeps the lines before an error
    except AssertionError as error:  # kills the engine's loop
        closing = {"truncated": True, "why": f"raised AssertionError: {error}"}
    if lines and lines[-1].get("truncated"):
        closing = lines.pop()
    return DecisionTrace(name, header, lines, closing)


class TrtllmDriver:
    """Runs TensorRT-LLM's scheduler with stubs and a fake model through a case."""

    def __init__(self, case: RecordingCase) -> None:
        self.config, self.requests, self.aborts = case.config, case.requests, case.aborts
        self.overlap = not case.config.disable_overlap_scheduler
        stand_in = ReusingKvCacheStub if case.config.enable_block_reuse else KvCacheStub
        self.cache = stand_in(
            case.config.num_blocks, case.config.tokens_per_block, case.config.longest
        )
        self.scheduler = _scheduler(case.config, self.cache)
        self.waiting_queue: deque[LlmRequestStub] = deque()
        self.active: list[LlmRequestStub] = []
        self.in_flight: deque[tuple[list[LlmRequestStub], list[LlmRequestStub]]] = deque()
        self.heard: set[int] = set()
        self.canceled: set[int] = set()
        self.left_early: set[int] = set()

    def lines(self) -> Iterator[RecordingLine]:
        """Yield one line per iteration, and a closing line if the run ends with unfinished
        requests.
        """
        arriving: dict[int, list[RecordingLine]] = {}
        for request in self.requests:
            arriving.setdefault(request["arrival_step"], []).append(request)
        alive = {request["id"] for request in self.requests}
        step = still = 0
        while alive:
            gone = self._leave(step, 0, alive)
            came = arriving.pop(step, ())
            for request in came:
                self.waiting_queue.append(self._request(request))
            gone += self._leave(step, 1, alive)
            self.canceled |= self.heard
            self.heard.clear()
            line = {"step": step, **self._iterate(step, alive, gone)}
            if gone:
                line["aborted"] = gone
            alive -= {*gone, *line["finished"]}
            yield line
            leaving = any(at > step for at, _, _ in self.aborts)
            still = 0 if came or line["scheduled"] or arriving or leaving else still + 1
            if still > MAX_IDLE_STEPS:
                yield {"truncated": True, "why": f"no progress: {sorted(alive)}"}
                return
            step += 1

    def _request(self, request: RecordingLine) -> LlmRequestStub:
        prompt, longest = request["prompt_tokens"], self.config.longest
        most = min(request["max_tokens"], longest - prompt)
        tokens = [
            (stream, at)
            for stream, start, end in request.get("segments", ())
            for at in range(start, end)
        ]
        return LlmRequestStub(request["id"], prompt, most, request["output_tokens"], tokens)

    def _leave(self, step: int, phase: int, alive: set[int]) -> list[int]:
        """Process the aborts of this phase; return the ids of the requests that had arrived."""
        ids = [i for at, when, i in self.aborts if (at, when) == (step, phase)]
        came = {r["id"] for r in self.requests if r["arrival_step"] < step + (phase > 0)}
        there = [i for i in dict.fromkeys(ids) if i in alive & came - self.left_early]
        self.left_early.update(there)
        self.heard.update(there)
        return there

    def _iterate(self, step: int, alive: set[int], gone: list[int]) -> RecordingLine:
        """Run one iteration of the executor's loop and return its line."""
        room = self.config.max_batch_size - len(self.active)
        for _ in range(min(room, len(self.waiting_queue))):
            self.active.append(self.waiting_queue.popleft())
        output = self.scheduler.schedule_request(self.active, set())
        contexts, generations = output.context_requests, output.generation_requests
        paused = output.paused_requests
        for r in paused:
            self.cache.remove_sequence(r)
        for r in contexts:
            if r.is_first_context_chunk:
                self.cache.add_sequence(r)
        for r in generations:
            self.cache.add_token(r)
        whole = not self.config.enable_chunked_prefill
        for r in contexts if whole else ():
            r.context_chunk_size = r.context_remaining_length
        line = self._decided(contexts, generations, paused)
        self.in_flight.append((contexts, generations))
        gone += self._leave(step, 2, alive)
        line["delivered"] = int(len(self.in_flight) == 1 + self.overlap)
        line["finished"] = self._finish(paused)
        line["waiting"] = [r.request_id for r in self.active if r.request_id not in self.cache.held]
        line["waiting"] += [r.request_id for r in self.waiting_queue]
        line["running"] = [r.request_id for r in self.active if r.request_id in self.cache.held]
        line["free_blocks"] = self.cache.free
        return line

    def _decided(
        self,
        contexts: list[LlmRequestStub],
        generations: list[LlmRequestStub],
        paused: list[LlmRequestStub],
    ) -> RecordingLine:
        kind = "mixed" if contexts and generations else "prefill" if contexts else "decode"
        return {
            "scheduled": [[r.request_id, r.context_chunk_size] for r in contexts]
            + [[r.request_id, 1] for r in generations],
            "kind": kind if contexts or generations else "idle",
            "preempted": [r.request_id for r in paused],
            "ignored": [],
        }

    def _finish(self, paused: list[LlmRequestStub]) -> list[int]:
        """Do the work after the launch: deliver tokens, pause requests, update the states of
        launched requests, and respond.

        Returns the ids of the requests that finished.
        """
        done: list[LlmRequestStub] = []
        contexts = self.in_flight[0][0] if len(self.in_flight) == 1 + self.overlap else []
        if self.overlap and len(self.in_flight) == 2:
            done = self._take_tokens()
        for r in paused:
            r.pause()
        self._update_states(*self.in_flight[-1])
        if not self.overlap:
            done = self._take_tokens()
        finished = self._respond() if done else []
        for r in contexts:
            self.cache.store_context_blocks(r)
        return finished

    def _take_tokens(self) -> list[LlmRequestStub]:
        """Run ``_update_requests`` on the oldest batch and return its requests."""
        contexts, generations = self.in_flight.popleft()
        for r in contexts:
            if not r.is_finished and r.context_remaining_length == 0:
                r.add_token()
        for r in generations:
            if not r.is_finished:
                r.add_token()
        return contexts + generations

    def _update_states(
        self, contexts: list[LlmRequestStub], generations: list[LlmRequestStub]
    ) -> None:
        """Run ``_update_request_states_tp``."""
        for r in contexts:
            if not r.is_finished:
                r.move_to_next_context_chunk()
            if r.context_remaining_length == 0:
                last = self.overlap and r.will_complete_next_iteration()
                to_complete = LlmRequestState.GENERATION_TO_COMPLETE
                r.state = to_complete if last else LlmRequestState.GENERATION_IN_PROGRESS
        for r in generations:
            if not r.is_finished and self.overlap and r.will_complete_next_iteration():
                r.state = LlmRequestState.GENERATION_TO_COMPLETE

    def _respond(self) -> list[int]:
        """Run ``_handle_canceled_requests`` and ``_handle_responses``.

        Returns the ids of the requests that finished.
        """
        self.waiting_queue = deque(
            r for r in self.waiting_queue if r.request_id not in self.canceled
        )
        for r in self.active:
            if r.request_id in self.canceled:
                r.state = LlmRequestState.GENERATION_COMPLETE
        self.canceled.clear()
        over = [r for r in self.active if r.is_finished]
        self.active = [r for r in self.active if not r.is_finished]
        for r in over:
            self.cache.remove_sequence(r)
        return [r.request_id for r in over if r.request_id not in self.left_early]


def _scheduler(config: TrtllmConfig, cache: KvCacheStub) -> Any:
    """Return the real scheduler, built as in ``create_py_executor_instance``."""
    module: Any = sys.modules[SCHEDULER]
    chunking = (config.context_chunking_policy, config.tokens_per_block)
    return module.SimpleUnifiedScheduler(
        max_batch_size=config.max_batch_size,
        max_num_tokens=config.max_num_tokens,
        kv_cache_manager=cache,
        peft_cache_manager=None,
        scheduler_policy=CapacitySchedulerPolicy[config.capacity_scheduler_policy],
        ctx_chunk_config=chunking if config.enable_chunked_prefill else None,
        two_step_lookahead=False,
        scheduler_capacity=config.max_batch_size,
    )
