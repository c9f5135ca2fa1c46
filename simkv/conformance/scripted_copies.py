"""When copies of KV are done in a recording: after so many steps as its header says."""

from __future__ import annotations

from collections.abc import Sequence

from simkv.core.scheduler_protocol import DiskTransfers, KvCopies


class ScriptedCopies:
    """Copy number ``n`` takes ``steps[n % len(steps)]`` steps.

    A load may be done in the step that begins it, a store in the next one. All that a step has to
    wait for is done in it.
    """

    def __init__(self, steps: Sequence[int]) -> None:
        self._steps = steps or [0]
        self._due: dict[int, int] = {}

    def begin(self, moves: KvCopies, step: int) -> None:
        """What a batch wants to be copied."""
        for first, jobs in ((step, moves.loads), (step + 1, moves.stores)):
            for number, *_ in jobs:
                self._due[number] = first + self._steps[number % len(self._steps)]
        for number in moves.flush:
            self._due[number] = min(self._due[number], step)

    def done(self, step: int) -> list[int]:
        """What the worker reports with the batch of this step, in the order of the numbers."""
        done = sorted(number for number, due in self._due.items() if due <= step)
        for number in done:
            del self._due[number]
        return done


class ScriptedDisk:
    """A disk: transfer number ``n`` is done ``steps[n % len(steps)]`` steps after it was asked for,
    and what is looked up is found out as many later as ``looks`` says, after all that is done
    then.
    """

    def __init__(self, steps: Sequence[int], looks: Sequence[int]) -> None:
        self._steps, self._delays = steps or [0], looks or [0]
        self._due: dict[int, int] = {}
        self._looks: dict[int, int] = {}

    def begin(self, moves: DiskTransfers, step: int) -> None:
        """What is asked for with a batch."""
        for move in (*moves.reads, *moves.writes):
            self._due[move.job] = step + self._steps[move.job % len(self._steps)]
        if moves.look:
            number = moves.look[0]
            self._looks[number] = step + self._delays[number % len(self._delays)]

    def done(self, step: int) -> tuple[list[int], list[int]]:
        """Transfers and looks that are done before the next decision, by their numbers."""
        found = []
        for due in (self._due, self._looks):
            found.append(sorted(number for number, last in due.items() if last <= step))
            for number in found[-1]:
                del due[number]
        return found[0], found[1]
