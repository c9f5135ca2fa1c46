"""Drives the Python scheduler of TensorRT-LLM, unmodified, through small workloads, step by step.

Real are ``SimpleUnifiedScheduler`` and all that it consists of: the capacity policies, how they
count blocks, the micro-batcher and its chunking. What stands in for requests and the block manager
is in ``trtllm_stubs.py``; the loop here does what ``_executor_loop`` and
``_executor_loop_overlap`` of ``py_executor.py`` do, in their order, for one rank and a fake model.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from simkv.conformance.decision_trace import FORMAT, DecisionTrace
from simkv.conformance.record.recording_case import RecordingCase
from simkv.conformance.record.trtllm_block_stubs import ReusingKvCacheStub
from simkv.conformance.record.trtllm_stubs import (
    SCHEDULER,
    CapacitySchedulerPolicy,
    KvCacheStub,
    LlmRequestState,
    LlmRequestStub,
)
from simkv.core.recording_format import RecordingLine
from simkv.schedulers.trtllm.config import VARIANTS, TrtllmConfig
from simkv.schedulers.trtllm.recording import RECORDING

#: A case in which so many steps deliver nothing never ends.
MAX_IDLE_STEPS = 100


def record(case: RecordingCase, _: str, name: str) -> DecisionTrace:
    """What the scheduler that is driven decides in a case."""
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
            lines.append(line)  # one by one: those before an error count
    except AssertionError as error:  # of which the engine's loop dies
        closing = {"truncated": True, "why": f"raised AssertionError: {error}"}
    if lines and lines[-1].get("truncated"):
        closing = lines.pop()
    return DecisionTrace(Path(f"{name}.jsonl.gz"), header, lines, closing)


class TrtllmDriver:
    """One case: the scheduler, stand-ins and a fake model, as many steps as it takes."""

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
        """One line per iteration; a closing one if nothing goes on any more."""
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
        """Clients leave now; returns those who were there."""
        ids = [i for at, when, i in self.aborts if (at, when) == (step, phase)]
        came = {r["id"] for r in self.requests if r["arrival_step"] < step + (phase > 0)}
        there = [i for i in dict.fromkeys(ids) if i in alive & came - self.left_early]
        self.left_early.update(there)
        self.heard.update(there)
        return there

    def _iterate(self, step: int, alive: set[int], gone: list[int]) -> RecordingLine:
        """An iteration of the executor's loop."""
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
        """What comes after the launch: tokens, pauses, the states of who was launched, the ends."""
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
        """``_update_requests`` of the oldest batch, whose requests it returns."""
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
        """``_update_request_states_tp``."""
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
        """``_handle_canceled_requests`` and ``_handle_responses``; who is told of its end."""
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
    """The real scheduler, as ``create_py_executor_instance`` makes it."""
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
