# mypyc: compile
"""vLLM's V1 scheduler with KV offloading: computed KV is loaded from host memory for reuse.

Source: vllm-project/vllm, ``vllm/v1/core/sched/scheduler.py`` with the offloading connector
(``offloading_connector.py``), for releases that have ``num_cpu_blocks`` (``release_knobs.py``). A
waiting request looks up its blocks in host memory that follow its prefix-cache hits, and loads
them.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from operator import attrgetter

from mypy_extensions import mypyc_attr

from simkv.core.request import Prompt
from simkv.core.scheduler_protocol import Batch, Completion
from simkv.schedulers.vllm.config import VllmConfig
from simkv.schedulers.vllm.offloading_connector import OffloadingConnector
from simkv.schedulers.vllm.release_rules import VllmRules
from simkv.schedulers.vllm.remote_kv_queue import RemoteKvQueue, TakenBlocksMemory
from simkv.schedulers.vllm.remote_kv_scheduler import VllmRemoteKvScheduler
from simkv.schedulers.vllm.request_state import RequestState
from simkv.schedulers.vllm.schedule_step import ScheduleStep
from simkv.schedulers.vllm.scheduler import AdmissionStep


@mypyc_attr(allow_interpreted_subclasses=True, serializable=True)
class VllmOffloadScheduler(VllmRemoteKvScheduler):
    """Scheduler with ``num_cpu_blocks`` KV blocks in host memory.

    ``Batch.moves`` lists the copies that start with a step.
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
        queue = RemoteKvQueue(config, self.rules)
        self.holding = queue
        self.waiting = queue
        self._reported: list[int] = []
        # number of batches in flight with copies; a copy may evict blocks from host memory
        self._moving = 0
        self._news = False

    # Events.

    def moved(self, jobs: Sequence[int]) -> None:
        """Record the completion of copies. ``jobs`` are their numbers.

        The scheduler processes the copies with the next completed batch.
        """
        self._reported += [job for job in jobs if job in self.connector.jobs]

    def finish_disk_transfers(self, jobs: Sequence[int], looks: Sequence[int]) -> None:
        """Record the completion of disk transfers and lookups.

        They take effect in the next step.
        """
        if self.connector.disk:
            self.connector.disk.done(jobs)
            self.connector.disk.looked(looks)

    def complete(self, batch: Batch, ended: Collection[int]) -> Completion:
        self._moving -= batch.moves is not None
        completion = super().complete(batch, ended)
        waited_for = batch.moves.flush if batch.moves else []
        done = dict.fromkeys((*self._reported, *waited_for))
        self._reported, self._news = [], self._news or bool(done)
        for i in sorted(self.connector.done(job for job in done if job in self.connector.jobs)):
            if r := self._gone.pop(i, None):
                self._free_blocks(r)
            else:
                self._arrived.add(i)
        return completion

    def add(self, prompt: Prompt) -> None:
        super().add(prompt)
        if r := self._live.get(prompt.id):
            self.connector.enter(r)

    def leap(self, most: int) -> int:
        unsure = self._reported or self._moving
        unsettled = unsure or self.has_pending_copies or self.connector.fenced
        return 1 if unsettled else super().leap(most)

    # Scheduling.

    def schedule(self) -> Batch:
        self._news = False
        return super().schedule()

    def _load(self, r: RequestState, step: ScheduleStep) -> AdmissionStep | None:
        if r.computed:
            return None
        hits = self.memory.hits(r)
        here = len(hits.groups[0])
        found = self.connector.matched(r, here)
        if here and (found is None or self.connector.disk):
            # a decode may evict a cached block, so more blocks have to be loaded
            self._waiting_settled = False
        if found is None:
            return self._stands_aside(r, step, self.connector.behind)
        if not found:
            return None
        turn = self._begin_load(r, hits, hits.tokens + found * self.memory.block_size, step)
        if r.id in self._loading:
            self.connector.load(r, here, here + found)
        return turn

    def _grant(self, r: RequestState, n: int, blocks: int, step: ScheduleStep) -> None:
        super()._grant(r, n, blocks, step)
        self.connector.runs(r)

    def _release(self, r: RequestState, unused: int = 0) -> None:
        if unused:
            self.noted.taken.difference_update(self.noted.table(r)[-unused:])
        self.connector.stops(r, self.noted.table(r))
        super()._release(r, unused)

    def _remove(self, r: RequestState) -> None:
        length = self.decoding.length(r) if r in self.decoding else r.length
        computed = self._computed(r) if r.id in self.running else 0
        table = self.noted.table(r) if r.id in self.running else None
        self.connector.ends(r, length, None if self._ending else computed, table)
        super()._remove(r)

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
        return batch

    # State.

    @property
    def awaits_kv(self) -> bool:
        """Whether a request may become schedulable when the copies in flight complete."""
        disk = self.connector.disk
        under_way = self.connector.jobs or (disk and (disk.jobs or disk.looks))
        return bool(under_way) and not self._news

    @property
    def has_pending_copies(self) -> bool:
        """Whether there are copies that are not listed in a batch yet."""
        return self.connector.disk is not None and self.connector.disk.has_pending_copies

    def fingerprint(self) -> Hashable:
        waiting = tuple((r.id, r.computed) for r in self.waiting)
        return super().fingerprint(), waiting, self.connector.fingerprint()
