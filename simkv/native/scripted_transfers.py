"""KV copies and transfers in a replay, whose durations (steps) are in the header."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

from simkv.core.scheduler_protocol import DiskTransfers, KvCopies


class StepTimer:
    """Work in progress by key; the work with number ``n`` takes ``steps[n % len(steps)]`` steps."""

    def __init__(self, steps: Sequence[int]) -> None:
        self._steps = steps or [0]
        self.due: dict[int, int] = {}

    def start(self, key: int, step: int, number: int | None = None) -> None:
        """Start work in a step; its number is ``key`` if no number is given."""
        number = key if number is None else number
        self.due[key] = step + self._steps[number % len(self._steps)]

    def done(self, step: int) -> list[int]:
        """Return the sorted keys of the work that finishes by ``step``, and forget it."""
        keys = sorted(key for key, last in self.due.items() if last <= step)
        for key in keys:
            del self.due[key]
        return keys


class ScriptedCopies(StepTimer):
    """KV copies; those to the GPU can finish in the step that starts them, others in the next."""

    def begin(self, moves: KvCopies, step: int) -> None:
        """Start the copies of a batch, and finish the copies that it requires to be finished."""
        for first, jobs in ((step, moves.loads), (step + 1, moves.stores)):
            for number, *_ in jobs:
                self.start(number, first)
        for number in moves.flush:
            self.due[number] = min(self.due[number], step)


class ScriptedDisk:
    """KV transfers to and from a disk, and lookups; transfers finish before lookups."""

    def __init__(self, steps: Sequence[int], looks: Sequence[int]) -> None:
        self._moves, self._looks = StepTimer(steps), StepTimer(looks)

    def begin(self, moves: DiskTransfers, step: int) -> None:
        """Start the disk transfers and the lookup that a batch requests."""
        for move in (*moves.reads, *moves.writes):
            self._moves.start(move.job, step)
        if moves.look:
            self._looks.start(moves.look[0], step)

    def done(self, step: int) -> tuple[list[int], list[int]]:
        """Return the transfers and the lookups that finish before the next decision."""
        return self._moves.done(step), self._looks.done(step)


class ScriptedTransfers:
    """KV transfers between replicas, which can finish in the step that starts them."""

    def __init__(self, steps: Sequence[int]) -> None:
        self._loads, self._sends = StepTimer(steps), StepTimer(steps)
        self._count = count()

    def begin(self, loads: Sequence[tuple[int, int]], sends: Sequence[int], step: int) -> None:
        """Start loads, given as (request id, number of blocks), and sends, given as request ids."""
        for i in (i for i, much in loads if much):
            self._loads.start(i, step, next(self._count))
        for i in sends:
            self._sends.start(i, step, next(self._count))

    def done(self, step: int) -> tuple[list[int], list[int]]:
        """Return the request ids of the loads and of the sends that finish by ``step``."""
        return self._loads.done(step), self._sends.done(step)
