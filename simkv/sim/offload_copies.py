"""Copies of KV between GPU, host memory and a disk, beside the steps of one replica."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import cast

import simpy

from simkv.core.scheduler_protocol import DiskTransfers, KvCopies, OffloadingScheduler
from simkv.costs.offload_link import OffloadLink
from simkv.sim.clock import ExactTimeout
from simkv.sim.replica import Replica
from simkv.sim.run_record import KvCopyCounts


class CopyEngine:
    """Carries out what batches say of copies, and tells the scheduler when one is done.

    The worker notices that between two steps, and the scheduler hears of it with the result of the
    next one, as vLLM's does. Of a ``disk``, which its own threads attend to, it hears in time for
    its next decision.
    """

    def __init__(
        self,
        env: simpy.Environment,
        replica: Replica,
        link: OffloadLink,
        disk: OffloadLink | None = None,
    ) -> None:
        self._env, self._replica, self._link, self._disk = env, replica, link, disk
        self._scheduler = cast("OffloadingScheduler", replica.scheduler)
        self._due: dict[int, float] = {}

    def before(self, moves: KvCopies, start: float) -> float:
        """A step is to begin at ``start``. Returns when it can: when all of ``flush`` is done."""
        for move in moves.stores:
            if move.job in moves.flush:
                self._begin(move.job, self._link.store(move.tokens, start))
        start = max([start, *(self._due.get(job, start) for job in moves.flush)])
        for move in moves.loads:
            self._begin(move.job, self._link.load(move.tokens, start))
        if moves.disk and self._disk:
            self._begin_on(self._disk, moves.disk)
        return start

    def after(self, moves: KvCopies, end: float) -> None:
        """The step is over at ``end``: what it computed can be copied."""
        for move in moves.stores:
            if move.job not in moves.flush:
                self._begin(move.job, self._link.store(move.tokens, end))

    def _begin(self, job: int, done: float) -> None:
        self._due[job] = done
        self._at(done, lambda: self._over(job))

    def _begin_on(self, disk: OffloadLink, moves: DiskTransfers) -> None:
        """The disk's part of a step begins when it is decided."""
        now = self._env.now
        for jobs, copy in ((moves.reads, disk.load), (moves.writes, disk.store)):
            for move in jobs:
                self._at(copy(move.tokens, now), partial(self._over_on_disk, [move.job], []))
        if moves.look:
            self._at(now + disk.latency, partial(self._over_on_disk, [], [moves.look[0]]))

    def _at(self, time: float, happens: Callable[[], None]) -> None:
        moment = ExactTimeout(self._env, time, ExactTimeout.BEFORE)
        moment.callbacks.append(lambda _: happens())

    def _over_on_disk(self, jobs: list[int], looks: list[int]) -> None:
        # A host memory too small for a prompt can read the same blocks for ever: that is no news.
        message = partial(self._scheduler.finish_disk_transfers, jobs, looks)
        self._replica.tell(message, news=False)

    def _over(self, job: int) -> None:
        del self._due[job]
        self._replica.tell(partial(self._scheduler.moved, [job]))


def attach_copy_engine(
    replica: Replica, link: OffloadLink, disk: OffloadLink | None = None
) -> None:
    """Let a replica copy over ``link``, and to a ``disk`` and back, and its record count that."""
    replica.copies = CopyEngine(replica.env, replica, link, disk)
    replica.record.copied = KvCopyCounts() if disk is None else KvCopyCounts(0, 0, 0, 0)
