"""vLLM's V1 scheduler with a KV connector: prefill replicas send KV, decode replicas load it.

Source: vllm-project/vllm 0.33.0, ``vllm/v1/core/sched/scheduler.py`` with the scheduler's side of
the NIXL connector, which reads from the other replica
(``vllm/distributed/kv_transfer/kv_connector/v1/nixl/pull_scheduler.py``). ``VllmRules`` holds the
differences of other releases.

- Prefill: a finished request retains its blocks until they have been read (``request_finished``
  returns ``delay_free_blocks``; ``finished_sending`` frees them). An aborted request does not.
- Decode: the replica loads the KV of the whole prompt, except for prefix-cache hits. A request
  starts to load when there are enough free blocks. It waits as ``WAITING_FOR_REMOTE_KVS`` until the
  load completes. Then the replica computes the last prompt token, which yields the first output.
  After a preemption it recomputes everything itself.

With asynchronous scheduling, if KV can be loaded: blocks that a step in flight writes to are freed
when it ends, and requests with such blocks cannot be preempted. If KV can be sent: tokens in flight
of a victim are discarded, and the victim does not wait for them.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Collection, Hashable, Mapping

from mypy_extensions import mypyc_attr

from simkv.core.block_pool import NO_BLOCKS
from simkv.core.scheduler_protocol import (
    Batch,
    Completion,
    Held,
    WaitReason,
    blocks_for,
)
from simkv.schedulers.vllm.config import VllmConfig
from simkv.schedulers.vllm.memory import CacheHits
from simkv.schedulers.vllm.release_rules import VllmRules
from simkv.schedulers.vllm.remote_kv_queue import RemoteKvQueue
from simkv.schedulers.vllm.request_state import RequestState
from simkv.schedulers.vllm.schedule_step import ScheduleStep
from simkv.schedulers.vllm.scheduler import AdmissionStep, VllmScheduler


@mypyc_attr(allow_interpreted_subclasses=True, serializable=True)
class VllmTransferScheduler(VllmScheduler):
    """Scheduler of replicas that send KV (``keep``, ``sent``) or load it (``fetch``, ``loaded``).

    Blocks of the requests in ``sends`` can be read since the newest step. ``_loading`` requests
    hold blocks and wait for their KV; it is complete for requests in ``_arrived``. ``_ready``
    requests have KV, with the number of cached blocks, and do not run yet. Clients of ``_gone``
    requests disconnected during the load. ``_unfinished`` requests load KV or compute a prompt.
    ``_freed`` are requests whose blocks a step in flight still writes to, with the number of steps
    to complete first. ``_dropped`` is the number of tokens in flight to discard, by request.
    """

    def __init__(
        self,
        config: VllmConfig,
        rules: VllmRules | None = None,
        *,
        tables: bool = False,  # noqa: ARG002
    ) -> None:
        super().__init__(config, rules, tables=True)
        self.holding = RemoteKvQueue(config, self.rules) if self.rules.queues_loads_apart else None
        if self.holding is not None:
            self.waiting = self.holding
        loads = config.kv_role != "kv_producer"
        self._fences = self.rules.frees_when_steps_end and loads and self.pipeline_depth > 1
        self._drops = self.rules.discards_victim_tokens and config.kv_role != "kv_consumer"
        self._dropped: dict[int, int] = {}
        self.sends: list[int] = []
        self._keeps: set[int] = set()
        self._kept: dict[int, RequestState] = {}
        self._ended: list[int] = []
        self._ending = False
        self._elsewhere: set[int] = set()
        self._loading: dict[int, RequestState] = {}
        self._arrived: set[int] = set()
        self._ready: dict[int, int] = {}
        self._gone: dict[int, RequestState] = {}
        self._loads: list[tuple[int, int]] = []
        self._unfinished: dict[int, RequestState] = {}
        self._freed: deque[tuple[int, RequestState]] = deque()
        self._begun = self._over = 0  # steps that compute

    # Sending KV.

    def keep(self, request_id: int) -> None:
        """Retain the blocks of this request after its end, until ``sent``; call before adding
        it."""
        self._keeps.add(request_id)

    def sent(self, request_id: int) -> None:
        """Free the blocks of a finished request: they were read, or no replica needs them."""
        self._keeps.discard(request_id)
        if r := self._kept.pop(request_id, None):
            super()._release(r)

    def complete(self, batch: Batch, ended: Collection[int]) -> Completion:
        if batch:
            self._over += 1
            while self._freed and self._freed[0][0] <= self._over:
                super()._release(self._freed.popleft()[1])
        if lost := [i for i, _ in batch.scheduled if i in self._dropped]:
            batch.emits = [i for i in batch.emits if i not in lost]
            ended = [i for i in ended if i not in lost]
        self._ending = True
        completion = super().complete(batch, ended)
        self._ending = False
        return completion

    # Loading KV.

    def fetch(self, request_id: int) -> None:
        """Load the KV of this request from another replica; call before adding it."""
        self._elsewhere.add(request_id)

    def loaded(self, request_id: int) -> None:
        """Record that the KV of a request is complete."""
        if request_id in self._loading:
            self._arrived.add(request_id)
        elif r := self._gone.pop(request_id, None):
            super()._release(r)

    def _consider(self, r: RequestState, step: ScheduleStep) -> AdmissionStep:
        if r.id in self._loading and not self._arrives(r):
            return self._stands_aside(r, step)
        return super()._consider(r, step)

    def _arrives(self, r: RequestState) -> bool:
        """Return whether the load of ``r`` is complete, and if so make ``r`` ready for
        admission."""
        if r.id not in self._arrived:
            return False
        del self._loading[r.id]
        self._arrived.discard(r.id)
        last = r.length - 1
        self.memory.register(
            r, r.computed if self.rules.caches_loaded_block else min(r.computed, last)
        )
        self._ready[r.id] = r.registered
        r.computed = min(r.computed, last)
        return True

    def _load(self, r: RequestState, step: ScheduleStep) -> AdmissionStep | None:
        if r.id not in self._elsewhere:
            return None
        hits, tokens = self.memory.hits(r), r.length
        if not self._fits(r, hits, tokens) or not self._leaves_reserved(hits, tokens):
            step.skip_request("blocks")
            return "stops"
        self._elsewhere.discard(r.id)
        if self.holding is not None:
            self.holding.hold(r)
        self.memory.share(r, hits)
        self.memory.take(r, self.memory.missing(hits, tokens), tokens)
        r.computed = tokens
        self._loading[r.id] = self._unfinished[r.id] = r
        self._loads.append((r.id, tokens - hits.tokens))
        turn = self._stands_aside(r, step)
        return turn if self.holding is None else "is taken"

    def _stands_aside(self, r: RequestState, step: ScheduleStep) -> AdmissionStep:
        r.deferred = True
        step.batch.aside[r.id] = "remote"
        return "steps aside"

    def _leaves_reserved(self, hits: CacheHits, tokens: int) -> bool:
        """Return whether a load leaves enough blocks for all requests that load KV or compute
        prompts."""
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
        """Return the ids of the blocks of ``r``."""
        assert self.memory.tables is not None
        return self.memory.tables.tables.get(r.id, NO_BLOCKS)

    def _fits(self, r: RequestState, hits: CacheHits, end: int) -> bool:
        if r.id not in self._ready:
            return super()._fits(r, hits, end)
        end = r.length if self.memory.whole else end
        wanted = blocks_for(end, self.memory.block_size) - len(self._table(r))
        return wanted <= self.memory.room(running=len(self.running) > 0)

    def _least(self, r: RequestState) -> int:  # noqa: ARG002
        return 0  # a request with loaded KV has blocks

    def _grant(self, r: RequestState, n: int, blocks: int, step: ScheduleStep) -> None:
        registered = self._ready.pop(r.id, None)
        if registered is not None:
            r.registered = registered
            blocks -= len(self._table(r))
        if r.computed + n < r.length:
            self._unfinished[r.id] = r
        super()._grant(r, n, blocks, step)

    # Preemption and release of blocks.

    def _gives_way(self, victim: RequestState) -> bool:
        if not (self._fences and self.rules.protects_in_flight):
            return True
        return not self._under_way(victim)

    def _under_way(self, r: RequestState) -> int:
        return self.decoding.in_flight(r) if r in self.decoding else r.in_flight

    def _preempt(self, r: RequestState, by: RequestState, step: ScheduleStep) -> None:
        super()._preempt(r, by, step)
        if self._drops and r.stale:
            self._dropped[r.id], r.stale = r.stale, 0

    def _deliver(self, r: RequestState, n: int, batch: Batch, *, emit: bool) -> bool:
        if r.id not in self._dropped:
            return super()._deliver(r, n, batch, emit=emit)
        r.in_flight -= n
        self._dropped[r.id] -= n
        if not self._dropped[r.id]:
            del self._dropped[r.id]
        return False

    def _sort_out_decodes(self) -> None:
        if not self._drops or self.pipeline_depth == 1:
            super()._sort_out_decodes()  # else any token may be discarded

    def _release(self, r: RequestState, unused: int = 0) -> None:
        self._unfinished.pop(r.id, None)
        if self._ending and r.id in self._keeps:
            self._kept[r.id] = r
            self._ended.append(r.id)
        elif self._fences and r.in_flight:
            self._freed.append((self._begun, r))
        else:
            super()._release(r, unused)

    def _remove(self, r: RequestState) -> None:
        if r.id in self._elsewhere:
            self._elsewhere.discard(r.id)
            self._loads.append((r.id, 0))  # notifies the sending replica
        loading = self._loading.pop(r.id, None)
        ready = self._ready.pop(r.id, None)
        self._unfinished.pop(r.id, None)
        self._dropped.pop(r.id, None)
        super()._remove(r)
        if loading and r.id not in self._arrived and self.rules.frees_loads_when_done:
            self._gone[r.id] = r
        elif loading or ready is not None:
            self._arrived.discard(r.id)
            super()._release(r)

    def _dispatch(self, step: ScheduleStep) -> Batch:
        batch = super()._dispatch(step)
        self._begun += bool(batch)
        batch.loads, self._loads = self._loads, []
        self.sends, self._ended = sorted(self._ended), []
        for r in step.tokens:
            if not r.chunk:
                self._unfinished.pop(r.id, None)
        if batch.held:
            batch.held = self._first_held(step)
        return batch

    def _first_held(self, step: ScheduleStep) -> Held:
        """Return the first blocked request that does not wait for KV, else the head of the
        queue."""
        for r in self.waiting:
            if step.batch.aside.get(r.id) != "remote":
                full: WaitReason = "slot" if step.budget > 0 else "budget"
                return Held(r.id, step.why or full)
        return Held(self.waiting.head().id, "remote")

    def leap(self, most: int) -> int:
        return 1 if self._freed else super().leap(most)

    def skip(self, steps: int) -> list[int]:
        self._begun += steps
        self._over += steps
        return super().skip(steps)

    # State.

    @property
    def awaits_kv(self) -> bool:
        """Whether a KV transfer is in flight, so that a halt is temporary."""
        return bool(self._kept or self._gone or self._loading.keys() - self._arrived)

    def blocks_held(self) -> Mapping[int, int]:
        assert self.memory.tables is not None
        return self.memory.tables.holdings()

    def fingerprint(self) -> Hashable:
        freed = tuple((steps - self._over, r.id) for steps, r in self._freed)
        coming = tuple(self._loading), tuple(self._arrived), tuple(self._ready), tuple(self._gone)
        return super().fingerprint(), coming, tuple(self._kept), freed, tuple(self._dropped.items())
