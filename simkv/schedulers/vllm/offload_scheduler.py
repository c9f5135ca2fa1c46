"""vLLM's V1 scheduler with KV offloading: computed KV is loaded from host memory for reuse.

Source: vllm-project/vllm, ``vllm/v1/core/sched/scheduler.py`` with the offloading connector
(``offloading_connector.py``), for releases that have ``num_cpu_blocks`` (``release_knobs.py``). A
waiting request looks up its blocks in host memory that follow its prefix-cache hits. If there are
any, it gets blocks for them but no tokens. It waits as ``WAITING_FOR_REMOTE_KVS`` with other
requests that hold blocks, which are tried first. When the copies are complete, it can be admitted
like any other request.

With asynchronous scheduling, blocks that a step in flight writes to are freed when it ends, and
requests with such blocks cannot be preempted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Hashable, Mapping, Sequence
from operator import attrgetter

from mypy_extensions import mypyc_attr

from simkv.core.request import Prompt
from simkv.core.scheduler_protocol import (
    Batch,
    Completion,
    Held,
    WaitReason,
    blocks_for,
)
from simkv.schedulers.vllm.config import VllmConfig
from simkv.schedulers.vllm.memory import CacheHits
from simkv.schedulers.vllm.offloading_connector import OffloadingConnector
from simkv.schedulers.vllm.release_rules import VllmRules
from simkv.schedulers.vllm.remote_kv_queue import RemoteKvQueue, TakenBlocksMemory
from simkv.schedulers.vllm.request_state import RequestState
from simkv.schedulers.vllm.schedule_step import ScheduleStep
from simkv.schedulers.vllm.scheduler import AdmissionStep, VllmScheduler


@mypyc_attr(allow_interpreted_subclasses=True, serializable=True)
class VllmOffloadScheduler(VllmScheduler):
    """Scheduler with ``num_cpu_blocks`` blocks in host memory; ``KvCopies`` lists a batch's copies.

    ``_loading`` requests wait for their copies, which are complete for requests in ``_arrived``.
    ``_ready`` requests have KV and blocks, with the number of cached ones, and do not run yet.
    Clients of ``_gone`` requests disconnected during the copies. ``_unfinished`` requests load KV
    or compute a prompt. ``_freed`` are requests whose blocks a step in flight still writes to, with
    the number of steps to complete first.
    """

    def __init__(
        self, config: VllmConfig, rules: VllmRules | None = None, *, tables: bool = False
    ) -> None:
        super().__init__(config, rules, tables=tables)
        assert isinstance(self.memory, TakenBlocksMemory)
        self.noted = self.memory
        self.connector = OffloadingConnector(
            self.memory,
            config.num_cpu_blocks,
            config.eviction_policy,
            self.rules,
            disk="fs" in config.secondary_tiers,
        )
        self.holding = RemoteKvQueue(config, self.rules)
        self.waiting = self.holding
        self._loading: dict[int, RequestState] = {}
        self._arrived: set[int] = set()
        self._ready: dict[int, int] = {}
        self._gone: dict[int, RequestState] = {}
        self._unfinished: dict[int, RequestState] = {}
        self._freed: deque[tuple[int, RequestState]] = deque()
        self._begun = self._over = 0  # steps that compute
        self._reported: list[int] = []
        self._moving = 0  # batches in flight with copies, which may evict blocks from host memory
        self._ending = self._news = False

    # Events.

    def moved(self, jobs: Sequence[int]) -> None:
        """Record completed copies; they take effect with the next completed batch."""
        self._reported += [job for job in jobs if job in self.connector.jobs]

    def finish_disk_transfers(self, jobs: Sequence[int], looks: Sequence[int]) -> None:
        """Record completed disk transfers and lookups; they take effect in the next step."""
        if self.connector.disk:
            self.connector.disk.done(jobs)
            self.connector.disk.looked(looks)

    def complete(self, batch: Batch, ended: Collection[int]) -> Completion:
        if batch:
            self._over += 1
            while self._freed and self._freed[0][0] <= self._over:
                super()._release(self._freed.popleft()[1])
        self._moving -= batch.moves is not None
        self._ending = True
        completion = super().complete(batch, ended)
        self._ending = False
        waited_for = batch.moves.flush if batch.moves else []
        done = dict.fromkeys((*self._reported, *waited_for))
        self._reported, self._news = [], self._news or bool(done)
        for i in sorted(self.connector.done(job for job in done if job in self.connector.jobs)):
            if r := self._gone.pop(i, None):
                super()._release(r)
            else:
                self._arrived.add(i)
        return completion

    def add(self, prompt: Prompt) -> None:
        super().add(prompt)
        if r := self._live.get(prompt.id):
            self.connector.enter(r)

    def leap(self, most: int) -> int:
        unsure = self._reported or self._freed or self._moving
        unsettled = unsure or self.has_pending_copies or self.connector.fenced
        return 1 if unsettled else super().leap(most)

    def skip(self, steps: int) -> list[int]:
        self._begun += steps
        self._over += steps
        return super().skip(steps)

    # Scheduling.

    def schedule(self) -> Batch:
        self._news = False
        return super().schedule()

    def _consider(self, r: RequestState, step: ScheduleStep) -> AdmissionStep:
        if r.id in self._loading and not self._arrives(r):
            return self._stands_aside(r, step, "kv")
        return super()._consider(r, step)

    def _arrives(self, r: RequestState) -> bool:
        """Return whether the copies of ``r`` are complete, and if so make ``r`` ready for
        admission."""
        if r.id not in self._arrived:
            return False
        del self._loading[r.id]
        self._arrived.discard(r.id)
        self.memory.register(r, r.computed)
        self._ready[r.id] = r.registered
        r.computed = min(r.computed, r.length - 1)
        return True

    def _load(self, r: RequestState, step: ScheduleStep) -> AdmissionStep | None:
        if r.computed:
            return None
        hits = self.memory.hits(r)
        here = len(hits.groups[0])
        found = self.connector.matched(r, here)
        if here and (found is None or self.connector.disk):
            self._waiting_settled = False  # a decode may evict a hit, which requires a larger load
        if found is None:
            return self._stands_aside(r, step, self.connector.behind)
        if not found:
            return None
        tokens = hits.tokens + found * self.memory.block_size
        reserved = self._promised()
        if not self._fits(r, hits, tokens) or not self._leaves(hits, tokens, reserved):
            step.skip_request("blocks")
            return "stops"
        self.holding.hold(r)
        self.memory.share(r, hits)
        self.memory.take(r, found, tokens)
        r.computed = tokens
        self._loading[r.id] = self._unfinished[r.id] = r
        self.connector.load(r, here, here + found)
        self._stands_aside(r, step, "kv")
        return "is taken"

    def _stands_aside(self, r: RequestState, step: ScheduleStep, why: WaitReason) -> AdmissionStep:
        r.deferred = True
        step.batch.aside[r.id] = why
        return "steps aside"

    def _promised(self) -> int:
        """Return the blocks still needed by all requests that load KV or compute prompts."""
        return sum(
            max(blocks_for(r.length, self.memory.block_size) - len(self.noted.table(r)), 0)
            for r in self._unfinished.values()
        )

    def _leaves(self, hits: CacheHits, tokens: int, reserved: int) -> bool:
        """Return whether ``reserved`` blocks stay free after allocation of the first ``tokens``
        tokens."""
        cache = self.memory.cache
        revived = cache.count_unreferenced(hits.groups[0]) if cache else 0
        room = self.memory.room(running=len(self.running) > 0) - reserved
        return self.memory.missing(hits, tokens) + revived <= room

    def _fits(self, r: RequestState, hits: CacheHits, end: int) -> bool:
        if r.id not in self._ready:
            return super()._fits(r, hits, end)
        end = r.length if self.memory.whole else end
        wanted = blocks_for(end, self.memory.block_size) - len(self.noted.table(r))
        return wanted <= self.memory.room(running=len(self.running) > 0)

    def _grant(self, r: RequestState, n: int, blocks: int, step: ScheduleStep) -> None:
        registered = self._ready.pop(r.id, None)
        if registered is not None:
            r.registered = registered
            blocks -= len(self.noted.table(r))
        if r.computed + n < r.length:
            self._unfinished[r.id] = r
        super()._grant(r, n, blocks, step)
        self.connector.runs(r)

    def _gives_way(self, victim: RequestState) -> bool:
        if self.pipeline_depth == 1 or not self.rules.protects_in_flight:
            return True
        return not self._under_way(victim)

    def _under_way(self, r: RequestState) -> int:
        return self.decoding.in_flight(r) if r in self.decoding else r.in_flight

    def _release(self, r: RequestState, unused: int = 0) -> None:
        if unused:
            self.noted.taken.difference_update(self.noted.table(r)[-unused:])
        self._unfinished.pop(r.id, None)
        self.connector.stops(r, self.noted.table(r))
        if self.pipeline_depth > 1 and r.in_flight:
            self._freed.append((self._begun, r))
        else:
            super()._release(r, unused)

    def _remove(self, r: RequestState) -> None:
        length = self.decoding.length(r) if r in self.decoding else r.length
        computed = self._computed(r) if r.id in self.running else 0
        table = self.noted.table(r) if r.id in self.running else None
        self.connector.ends(r, length, None if self._ending else computed, table)
        loading = self._loading.pop(r.id, None)
        ready = self._ready.pop(r.id, None)
        self._unfinished.pop(r.id, None)
        super()._remove(r)
        if loading and r.id not in self._arrived:
            self._gone[r.id] = r
        elif loading or ready is not None:
            self._arrived.discard(r.id)
            super()._release(r)

    def _dispatch(self, step: ScheduleStep) -> Batch:
        given = []
        for r in sorted(self.connector.owing(), key=attrgetter("order")):
            if r in step.tokens:
                given.append((r, r.length, step.tokens[r]))
            elif r in self.decoding:
                given.append((r, self.decoding.length(r), 1))
        assert self.memory.tables is not None
        tables, taken = self.memory.tables.tables, self.noted.taken
        preempted = step.batch.preempted
        step.batch.moves = self.connector.moves(given, tables, taken, preempted)
        self._moving += step.batch.moves is not None
        batch = super()._dispatch(step)
        batch.fatal = batch.fatal or self.connector.died
        self._begun += bool(batch)
        for r in step.tokens:
            if not r.chunk:
                self._unfinished.pop(r.id, None)
        if batch.held:
            batch.held = self._first_held(step)
        return batch

    def _first_held(self, step: ScheduleStep) -> Held:
        """Return the first blocked request that does not wait for copies, else the head of the
        queue."""
        for r in self.waiting:
            if step.batch.aside.get(r.id) not in ("kv", "disk"):
                full: WaitReason = "slot" if step.budget > 0 else "budget"
                return Held(r.id, step.why or full)
        head = self.waiting.head().id
        return Held(head, step.batch.aside[head])

    # State.

    @property
    def awaits_kv(self) -> bool:
        """Whether copies are in flight, so that a halt is temporary."""
        disk = self.connector.disk
        under_way = self.connector.jobs or (disk and (disk.jobs or disk.looks))
        return bool(under_way) and not self._news

    @property
    def has_pending_copies(self) -> bool:
        """Whether there are copies to start that no batch contains yet."""
        return self.connector.disk is not None and self.connector.disk.has_pending_copies

    def blocks_held(self) -> Mapping[int, int]:
        assert self.memory.tables is not None
        return self.memory.tables.holdings()

    def fingerprint(self) -> Hashable:
        waiting = tuple((r.id, r.computed) for r in self.waiting)
        freed = tuple((steps - self._over, r.id) for steps, r in self._freed)
        states = tuple(self._loading), tuple(self._arrived), tuple(self._gone), freed
        return super().fingerprint(), waiting, states, self.connector.fingerprint()
