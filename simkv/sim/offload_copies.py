"""KV copies of a replica between GPU, host memory and disk."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import cast

import simpy

from simkv.core.scheduler_protocol import DiskTransfers, KvCopies, OffloadingScheduler
from simkv.costs.offload_link import OffloadLink
from simkv.sim.clock import ExactTimeout
from simkv.sim.replica_base import Replica
from simkv.sim.run_record import KvCopyCounts


class CopyEngine:
    """Execution of the KV copies that are listed in batches.

    The scheduler learns of completed copies with the next result, as in vLLM. It learns of
    completed disk transfers before the next decision.
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
        """Start the copies that precede a step. Return the time (s) at which the step can begin.

        ``start`` is the planned start of the step. The step waits for the jobs in ``moves.flush``.
        """
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
        """Start the copies to host memory that follow a step.

        ``end`` (s) is the end of the step.
        """
        for move in moves.stores:
            if move.job not in moves.flush:
                self._begin(move.job, self._link.store(move.tokens, end))

    def _begin(self, job: int, done: float) -> None:
        self._due[job] = done
        self._at(done, lambda: self._finish(job))

    def _begin_on(self, disk: OffloadLink, moves: DiskTransfers) -> None:
        """Start the disk transfers of a step."""
        now = self._env.now
        for jobs, copy in ((moves.reads, disk.load), (moves.writes, disk.store)):
            for move in jobs:
                self._at(copy(move.tokens, now), partial(self._finish_on_disk, [move.job], []))
        if moves.look:
            self._at(now + disk.latency, partial(self._finish_on_disk, [], [moves.look[0]]))

    def _at(self, time: float, happens: Callable[[], None]) -> None:
        moment = ExactTimeout(self._env, time, ExactTimeout.BEFORE)
        moment.callbacks.append(lambda _: happens())

    def _finish_on_disk(self, jobs: list[int], looks: list[int]) -> None:
        # If host memory is too small for a prompt, the same blocks can be read forever. Such reads
        # must not count as progress.
        message = partial(self._scheduler.finish_disk_transfers, jobs, looks)
        self._replica.call_soon(message, news=False)

    def _finish(self, job: int) -> None:
        del self._due[job]
        self._replica.call_soon(partial(self._scheduler.moved, [job]))


def attach_copy_engine(
    replica: Replica, link: OffloadLink, disk: OffloadLink | None = None
) -> None:
    """Add a copy engine to a replica. The replica's record then counts the copies.

    ``link`` connects GPU and host memory. ``disk`` connects host memory and disk.
    """
    replica.copy_engine = CopyEngine(replica.env, replica, link, disk)
    replica.record.copied = KvCopyCounts() if disk is None else KvCopyCounts(0, 0, 0, 0)
