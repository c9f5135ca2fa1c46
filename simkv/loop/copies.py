"""Copies of KV between GPU and host memory, beside the steps of one replica."""

from __future__ import annotations

from functools import partial
from typing import cast

import simpy

from simkv.core.scheduler import Moves, Offloader
from simkv.costs.offloadlink import OffloadLink
from simkv.loop.clock import Moment
from simkv.loop.record import Copied
from simkv.loop.replica import Replica


class CopyEngine:
    """Carries out what batches say of copies, and tells the scheduler when one is done.

    The worker notices that between two steps, and the scheduler hears of it with the result of the
    next one, as vLLM's does.
    """

    def __init__(self, env: simpy.Environment, replica: Replica, link: OffloadLink) -> None:
        self._env, self._replica, self._link = env, replica, link
        self._scheduler = cast("Offloader", replica.scheduler)
        self._due: dict[int, float] = {}

    def before(self, moves: Moves, start: float) -> float:
        """A step is to begin at ``start``. Returns when it can: when all of ``flush`` is done."""
        for move in moves.stores:
            if move.job in moves.flush:
                self._begin(move.job, self._link.store(move.tokens, start))
        start = max([start, *(self._due.get(job, start) for job in moves.flush)])
        for move in moves.loads:
            self._begin(move.job, self._link.load(move.tokens, start))
        return start

    def after(self, moves: Moves, end: float) -> None:
        """The step is over at ``end``: what it computed can be copied."""
        for move in moves.stores:
            if move.job not in moves.flush:
                self._begin(move.job, self._link.store(move.tokens, end))

    def _begin(self, job: int, done: float) -> None:
        self._due[job] = done
        moment = Moment(self._env, done, Moment.BEFORE)
        moment.callbacks.append(lambda _: self._over(job))

    def _over(self, job: int) -> None:
        del self._due[job]
        self._replica.tell(partial(self._scheduler.moved, [job]))


def with_copies(replica: Replica, link: OffloadLink) -> None:
    """Let a replica copy over ``link``, and its record count that."""
    replica.copies = CopyEngine(replica.env, replica, link)
    replica.record.copied = Copied()
