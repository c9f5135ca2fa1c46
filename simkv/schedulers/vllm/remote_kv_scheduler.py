# mypyc: compile
"""Base of vLLM's schedulers that load KV from host memory or from another replica.

Source: ``vllm/v1/core/sched/scheduler.py``. If the KV of a waiting request can be loaded, the
request gets blocks for it and waits in the state ``WAITING_FOR_REMOTE_KVS``; no step computes its
tokens. When the load is complete, the request can be admitted like any other request.

With asynchronous scheduling, blocks written by a step in flight are freed only when that step ends
(rule ``frees_when_steps_end``). Requests with such blocks cannot be preempted (rule
``protects_in_flight``).
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Collection, Hashable, Mapping

from mypy_extensions import mypyc_attr

from simkv.core.block_pool import NO_BLOCKS
from simkv.core.scheduler_protocol import Batch, Completion, Held, WaitReason, blocks_for
from simkv.schedulers.vllm.config import VllmConfig
from simkv.schedulers.vllm.memory import CacheHits
from simkv.schedulers.vllm.release_rules import VllmRules
from simkv.schedulers.vllm.remote_kv_queue import RemoteKvQueue
from simkv.schedulers.vllm.request_state import RequestState
from simkv.schedulers.vllm.schedule_step import ScheduleStep
from simkv.schedulers.vllm.scheduler import AdmissionStep, VllmScheduler

#: Reasons to wait for a load.
LOADING_REASONS = ("kv", "disk", "remote")


@mypyc_attr(allow_interpreted_subclasses=True, serializable=True)
class VllmRemoteKvScheduler(VllmScheduler):
    """Scheduler in which requests load KV.

    If a step in flight still writes to a block, the block can be freed later than in
    ``VllmScheduler``.
    """

    # ``_loading``: requests that hold blocks and wait for their KV. ``_arrived``: requests among
    # them whose KV is complete. ``_ready``: requests whose load is complete and that do not run
    # yet, with the number of their blocks in the prefix cache. ``_gone``: requests whose clients
    # disconnected during the load. ``_unfinished``: requests that are loading KV or computing their
    # prompt. ``_freed``: requests whose blocks are freed later because a step in flight still
    # writes to them, with the number of steps that must complete first.

    def __init__(self, config: VllmConfig, rules: VllmRules | None, *, tables: bool) -> None:
        super().__init__(config, rules, tables=tables)
        self.holding: RemoteKvQueue | None = None
        loads = config.kv_connector is None or config.kv_role != "kv_producer"
        asynchronous = self.pipeline_depth > 1
        self._fences = self.rules.frees_when_steps_end and loads and asynchronous
        self._loading_reason: WaitReason = "kv"
        self._loading: dict[int, RequestState] = {}
        self._arrived: set[int] = set()
        self._ready: dict[int, int] = {}
        self._gone: dict[int, RequestState] = {}
        self._unfinished: dict[int, RequestState] = {}
        self._freed: deque[tuple[int, RequestState]] = deque()
        self._begun = self._over = 0  # steps with scheduled tokens
        self._ending = False

    def complete(self, batch: Batch, ended: Collection[int]) -> Completion:
        if batch:
            self._over += 1
            while self._freed and self._freed[0][0] <= self._over:
                self._free_blocks(self._freed.popleft()[1])
        self._ending = True
        completion = super().complete(batch, ended)
        self._ending = False
        return completion

    def leap(self, most: int) -> int:
        return 1 if self._freed else super().leap(most)

    def skip(self, steps: int) -> list[int]:
        self._begun += steps
        self._over += steps
        return super().skip(steps)

    def _consider(self, r: RequestState, step: ScheduleStep) -> AdmissionStep:
        if r.id in self._loading and not self._arrives(r):
            return self._stands_aside(r, step, self._loading_reason)
        return super()._consider(r, step)

    def _arrives(self, r: RequestState) -> bool:
        """Return whether the KV of ``r`` is complete. If so, make ``r`` ready for admission."""
        if r.id not in self._arrived:
            return False
        del self._loading[r.id]
        self._arrived.discard(r.id)
        last = r.length - 1
        cached = r.computed if self.rules.caches_loaded_block else min(r.computed, last)
        self.memory.register(r, cached)
        self._ready[r.id] = r.registered
        r.computed = min(r.computed, last)
        return True

    def _begin_load(
        self, r: RequestState, hits: CacheHits, tokens: int, step: ScheduleStep
    ) -> AdmissionStep:
        """Allocate blocks for the first ``tokens`` tokens of ``r`` and start to load their KV.

        Returns "stops" if too few blocks are free.
        """
        # The cached blocks ``hits`` are not loaded.
        if not self._fits(r, hits, tokens) or not self._leaves_reserved(hits, tokens):
            step.skip_request("blocks")
            return "stops"
        if self.holding is not None:
            self.holding.hold(r)
        self.memory.share(r, hits)
        self.memory.take(r, self.memory.missing(hits, tokens), tokens)
        r.computed = tokens
        self._loading[r.id] = self._unfinished[r.id] = r
        turn = self._stands_aside(r, step, self._loading_reason)
        return turn if self.holding is None else "is taken"

    def _stands_aside(self, r: RequestState, step: ScheduleStep, why: WaitReason) -> AdmissionStep:
        r.deferred = True
        step.batch.aside[r.id] = why
        return "steps aside"

    def _leaves_reserved(self, hits: CacheHits, tokens: int) -> bool:
        """Return whether enough blocks stay free for all unfinished prompts after a load."""
        if not self.rules.reserves_for_prompts:
            return True
        size, cache = self.memory.block_size, self.memory.cache
        promised = sum(
            max(blocks_for(r.length, size) - len(self._table(r)), 0)
            for r in self._unfinished.values()
        )
        revived = cache.count_unreferenced(hits.groups[0]) if cache else 0
        room = self.memory.room(running=len(self.running) > 0) - promised
        return self.memory.missing(hits, tokens) + revived <= room

    def _table(self, r: RequestState) -> array[int]:
        assert self.memory.tables is not None
        return self.memory.tables.tables.get(r.id, NO_BLOCKS)

    def _fits(self, r: RequestState, hits: CacheHits, end: int) -> bool:
        if r.id not in self._ready:
            return super()._fits(r, hits, end)
        end = r.length if self.memory.whole else end
        wanted = blocks_for(end, self.memory.block_size) - len(self._table(r))
        return wanted <= self.memory.room(running=len(self.running) > 0)

    def _grant(self, r: RequestState, n: int, blocks: int, step: ScheduleStep) -> None:
        registered = self._ready.pop(r.id, None)
        if registered is not None:
            r.registered = registered
            blocks -= len(self._table(r))
        if r.computed + n < r.length:
            self._unfinished[r.id] = r
        super()._grant(r, n, blocks, step)

    def _gives_way(self, victim: RequestState) -> bool:
        if not (self._fences and self.rules.protects_in_flight):
            return True
        group = self.decoding
        return not (group.in_flight(victim) if victim in group else victim.in_flight)

    def _release(self, r: RequestState, unused: int = 0) -> None:
        self._unfinished.pop(r.id, None)
        if self._fences and r.in_flight:
            self._freed.append((self._begun, r))
        else:
            self._free_blocks(r, unused)

    def _free_blocks(self, r: RequestState, unused: int = 0) -> None:
        self.memory.release(r, unused)

    def _remove(self, r: RequestState) -> None:
        loading = self._loading.pop(r.id, None)
        ready = self._ready.pop(r.id, None)
        self._unfinished.pop(r.id, None)
        super()._remove(r)
        if loading and r.id not in self._arrived and self.rules.frees_loads_when_done:
            self._gone[r.id] = r
        elif loading or ready is not None:
            self._arrived.discard(r.id)
            self._free_blocks(r)

    def _dispatch(self, step: ScheduleStep) -> Batch:
        batch = super()._dispatch(step)
        self._begun += bool(batch)
        for r in step.tokens:
            if not r.chunk:
                self._unfinished.pop(r.id, None)
        if batch.held:
            batch.held = self._first_held(step)
        return batch

    def _first_held(self, step: ScheduleStep) -> Held:
        """Return the first waiting request that does not wait for a load, or else the head of the
        queue.
        """
        for r in self.waiting:
            if step.batch.aside.get(r.id) not in LOADING_REASONS:
                full: WaitReason = "slot" if step.budget > 0 else "budget"
                return Held(r.id, step.why or full)
        head = self.waiting.head().id
        return Held(head, step.batch.aside[head])

    def blocks_held(self) -> Mapping[int, int]:
        assert self.memory.tables is not None
        return self.memory.tables.holdings()

    def fingerprint(self) -> Hashable:
        freed = tuple((steps - self._over, r.id) for steps, r in self._freed)
        states = tuple(self._loading), tuple(self._arrived), tuple(self._gone), freed
        return super().fingerprint(), states
