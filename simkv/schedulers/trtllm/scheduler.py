"""An iteration of TensorRT-LLM's PyTorch backend: fetch, schedule, pause, prepare, launch.

Source: NVIDIA/TensorRT-LLM@5f480b7a6, ``_executor_loop`` and ``_executor_loop_overlap`` of
``pyexecutor/py_executor.py``, ``SimpleUnifiedScheduler`` of ``pyexecutor/scheduler/scheduler.py``.
Blocks and requests follow ``kvCacheManager.cpp`` and ``llmRequest.h`` of about the same date. The
model has one rank and one attention window, without draft tokens and adapters.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Hashable, Mapping
from dataclasses import astuple

from simkv.core.block_pool import BlockPool
from simkv.core.request import Prompt
from simkv.core.scheduler_protocol import (
    Batch,
    BatchKind,
    Completion,
    Held,
    Refusal,
    WaitReason,
)
from simkv.schedulers.trtllm import decode_leap
from simkv.schedulers.trtllm.block_reuse import ReusingKvCache
from simkv.schedulers.trtllm.capacity_scheduler import CapacityResult, max_utilization, no_evict
from simkv.schedulers.trtllm.config import TrtllmConfig, find_rejection
from simkv.schedulers.trtllm.llm_request import LlmRequest
from simkv.schedulers.trtllm.memory import KvCache
from simkv.schedulers.trtllm.micro_batch_scheduler import (
    ContextTooLong,
    MicroBatch,
    schedule_micro_batch,
)


class TrtllmScheduler:
    """TensorRT-LLM's scheduler.

    - ``queue``: requests that no iteration has fetched yet.
    - ``active``: fetched requests in arrival order. An active request without blocks waits.
    - ``launched``: requests of the newest step. The results of this step are not processed yet.
    - ``pausing``: requests that this iteration has paused.
    - ``leaving``: ids of requests whose clients have disconnected.
    """

    # An active request without blocks was either never admitted or is paused; a paused request
    # keeps its position.

    def __init__(self, config: TrtllmConfig) -> None:
        self.config = config
        self.overlap = not config.disable_overlap_scheduler
        self.pipeline_depth = 2 if self.overlap else 1
        made = ReusingKvCache if config.enable_block_reuse else KvCache
        self.cache = made(config.num_blocks, config.tokens_per_block)
        self.queue: deque[LlmRequest] = deque()
        self.active: dict[int, LlmRequest] = {}
        self.launched: list[LlmRequest] = []
        self.pausing: list[LlmRequest] = []
        self.why: WaitReason = "blocks"
        self._left: set[int] = set()
        self.leaving: set[int] = set()
        self._refused: dict[int, Refusal] = {}

    def add(self, prompt: Prompt) -> None:
        """Queue a request. A request that the server rejects is reported in the next batch."""
        refusal = find_rejection(prompt, self.config)
        if refusal:
            self._refused[prompt.id] = refusal
        else:
            self.cache.hear(prompt)
            self.queue.append(LlmRequest.of(prompt, self.config.longest))

    def abort(self, request_id: int) -> None:
        """Record that the client has disconnected.

        The request is removed in a later iteration that schedules tokens.
        """
        self._left.add(request_id)

    # ------------------------------------------------------------------ one iteration

    def schedule(self) -> Batch:
        """Schedule a step.

        This frees the blocks of paused requests and allocates the blocks of the step.
        """
        self._move_on()
        while self.queue and len(self.active) < self.config.max_batch_size:
            r = self.queue.popleft()
            self.active[r.id] = r
        self.leaving |= self._left
        self._left.clear()
        batch = Batch(refused=self._refused)
        self._refused = {}
        fitting = self._fitting()
        try:
            chosen = schedule_micro_batch(fitting.fits, self.config)
        except ContextTooLong as error:
            batch.fatal = f"raised AssertionError: {error}"
            return batch
        for victim, by in fitting.paused:
            self.cache.release(victim)
            self.pausing.append(victim)
            batch.preempt(victim.id, None if by is None else by.id)
        self._launch(batch, chosen)
        self._tell(batch, fitting)
        return batch

    def _fitting(self) -> CapacityResult:
        active, policy = list(self.active.values()), self.config.capacity_scheduler_policy
        if policy == "MAX_UTILIZATION":
            return max_utilization(active, self.cache)
        return no_evict(active, self.cache, static=policy == "STATIC_BATCH")

    def _move_on(self) -> None:
        """Finish the previous iteration: reset paused requests and advance launched requests."""
        for r in self.pausing:
            r.pause()
        self.pausing.clear()
        for r in self.launched:
            r.advance(overlap=self.overlap)
        self.launched = []

    def _launch(self, batch: Batch, chosen: MicroBatch) -> None:
        """Allocate the blocks of the step and record it in ``batch``."""
        for r in chosen.contexts:
            self.cache.prepare(r)
            batch.scheduled.append((r.id, r.chunk))
            batch.context.append(r.position)
            if r.last_chunk:
                batch.emits.append(r.id)
        for r in chosen.generations:
            self.cache.prepare(r)
            batch.scheduled.append((r.id, 1))
            batch.context.append(r.cached - 1)
            batch.emits.append(r.id)
        batch.kind = _kind(chosen)
        self.launched = [*chosen.contexts, *chosen.generations]

    def _tell(self, batch: Batch, fitting: CapacityResult) -> None:
        """Record in ``batch`` the active requests that do not run, with their wait reasons."""
        runs = {r.id for r in self.launched}
        fits = {r.id for r in fitting.fits}
        for r in self.active.values():
            if self.pool.held(r.id) and r.id not in runs and r.state != "to complete":
                batch.aside[r.id] = "budget" if r.id in fits else fitting.why
        head = self.head
        if head is not None:
            self.why = "budget" if head.id in fits else fitting.why
            if head in fitting.skipped:
                self.why = "rule"
            batch.held = Held(head.id, self.why)
        elif self.queue:
            batch.held = Held(self.queue[0].id, "slot")

    def complete(self, batch: Batch, ended: Collection[int]) -> Completion:
        """Deliver the tokens of a batch. End the requests that received their last token."""
        # A request that was paused after the launch does not end with its last token. The pause
        # resets it, so it is recomputed completely before it ends.
        done = Completion([], [])
        for r in [self.active[i] for i in batch.emits if i in self.active]:
            r.known += 1
            last = r.id in ended or r.generated >= r.new
            if last and r in self.pausing:
                continue
            done.delivered.append(r.id)
            if last:
                done.finished.append(r.id)
        done.finished.sort(key=list(self.active).index)
        if done.finished or (batch and self.leaving):
            self._part(batch, done.finished)
        for (i, tokens), context in zip(batch.scheduled, batch.context, strict=True):
            if self.pool.held(i) and context + tokens <= self.active[i].prompt:
                self.cache.store(self.active[i])
        return done

    def _part(self, batch: Batch, finished: Collection[int]) -> None:
        """Drop ended requests and, if there is a batch, requests whose clients disconnected.

        Active requests are dropped in arrival order.
        """
        over = {*finished}
        if batch:
            over |= self.leaving
            gone = [r.id for r in self.queue if r.id in self.leaving]
            for i in gone:
                self.cache.forget(i)
            if gone:
                self.queue = deque(r for r in self.queue if r.id not in self.leaving)
            self.leaving.clear()
        for r in [r for i, r in self.active.items() if i in over]:
            self._remove(r)

    def _remove(self, r: LlmRequest) -> None:
        del self.active[r.id]
        self.cache.release(r)
        self.cache.forget(r.id)
        self.pausing = [p for p in self.pausing if p is not r]
        self.launched = [x for x in self.launched if x is not r]

    # ------------------------------------------------------------------ leaping

    def leap(self, most: int) -> int:
        """Return the number of decode-only steps until a request ends or may be admitted.

        No request is paused in these steps.
        """
        # Decodes take only blocks reserved for them and free none, so a request that lacks blocks
        # does not get them during the leap. A request that waits for the token budget could be
        # admitted in any step, so the result is 1 in that case.
        head = self.head
        if self.pausing or self.leaving or len(self.launched) < self.num_running:
            return 1
        if head and self.why == "budget":
            return 1
        least = self.cache.blocks_to_completion(head) if head and self.why == "reserved" else 0
        return decode_leap.leap(self.launched, self.cache, least, self.pipeline_depth - 1, most)

    def skip(self, steps: int) -> list[int]:
        return decode_leap.skip(self.launched, self.cache, steps)

    # ------------------------------------------------------------------ public state

    @property
    def pool(self) -> BlockPool:
        """Block pool of the KV cache."""
        return self.cache.pool

    @property
    def num_blocks(self) -> int:
        return self.config.num_blocks

    @property
    def free_blocks(self) -> int:
        return self.cache.pool.free

    @property
    def head(self) -> LlmRequest | None:
        """First active request without blocks, or None."""
        return next((r for r in self.active.values() if not self.pool.held(r.id)), None)

    @property
    def num_waiting(self) -> int:
        return len(self.active) - self.num_running + len(self.queue)

    @property
    def num_running(self) -> int:
        return sum(map(bool, map(self.pool.held, self.active)))

    def waiting_ids(self) -> list[int]:
        """Return the ids of the waiting requests. Requests that are not fetched yet come last."""
        without = [i for i in self.active if not self.pool.held(i)]
        return without + [r.id for r in self.queue]

    def running_ids(self) -> list[int]:
        """Return the ids of active requests with blocks, in arrival order."""
        return [i for i in self.active if self.pool.held(i)]

    def blocks_held(self) -> Mapping[int, int]:
        return {i: held for i in self.active if (held := self.pool.held(i))}

    def fingerprint(self) -> Hashable:
        """Return the state that determines the next ``schedule`` call."""
        return (
            tuple((astuple(r), self.pool.held(r.id)) for r in self.active.values()),
            tuple(r.id for r in self.queue),
            tuple(r.id for r in self.pausing),
            tuple(r.id for r in self.launched),
            self.cache.fingerprint(),
            tuple(sorted(self.leaving)),
        )


def _kind(chosen: MicroBatch) -> BatchKind:
    if chosen.contexts:
        return "mixed" if chosen.generations else "prefill"
    return "decode" if chosen.generations else "idle"
