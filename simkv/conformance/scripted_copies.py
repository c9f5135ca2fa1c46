"""Completion of KV copies in a recording: after the number of steps in its header."""

from __future__ import annotations

from collections.abc import Sequence

from simkv.core.scheduler_protocol import DiskTransfers, KvCopies


class ScriptedCopies:
    """Copies in which number ``n`` takes ``steps[n % len(steps)]`` steps.

    A load may finish in the step that starts it, a store in the next one. A copy that a step
    flushes finishes in that step.
    """

    def __init__(self, steps: Sequence[int]) -> None:
        self._steps = steps or [0]
        self._due: dict[int, int] = {}

    def begin(self, moves: KvCopies, step: int) -> None:
        """Start the copies of a batch."""
        for first, jobs in ((step, moves.loads), (step + 1, moves.stores)):
            for number, *_ in jobs:
                self._due[number] = first + self._steps[number % len(self._steps)]
        for number in moves.flush:
            self._due[number] = min(self._due[number], step)

    def done(self, step: int) -> list[int]:
        """Return the numbers of the copies reported with this step's batch, in order."""
        done = sorted(number for number, due in self._due.items() if due <= step)
        for number in done:
            del self._due[number]
        return done


class ScriptedDisk:
    """A disk whose transfer ``n`` finishes ``steps[n % len(steps)]`` steps after its request.

    A lookup takes the number of steps in ``looks`` and finishes after the transfers of its last
    step.
    """

    def __init__(self, steps: Sequence[int], looks: Sequence[int]) -> None:
        self._steps, self._delays = steps or [0], looks or [0]
        self._due: dict[int, int] = {}
        self._looks: dict[int, int] = {}

    def begin(self, moves: DiskTransfers, step: int) -> None:
        """Start the transfers and the lookup of a batch."""
        for move in (*moves.reads, *moves.writes):
            self._due[move.job] = step + self._steps[move.job % len(self._steps)]
        if moves.look:
            number = moves.look[0]
            self._looks[number] = step + self._delays[number % len(self._delays)]

    def done(self, step: int) -> tuple[list[int], list[int]]:
        """Return the numbers of transfers and lookups that finish before the next decision."""
        found = []
        for due in (self._due, self._looks):
            found.append(sorted(number for number, last in due.items() if last <= step))
            for number in found[-1]:
                del due[number]
        return found[0], found[1]
