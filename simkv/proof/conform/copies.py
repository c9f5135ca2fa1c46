"""When copies of KV are done in a recording: after so many steps as its header says."""

from __future__ import annotations

from collections.abc import Sequence

from simkv.core.scheduler import Moves


class ScriptedCopies:
    """Copy number ``n`` takes ``steps[n % len(steps)]`` steps.

    A load may be done in the step that begins it, a store in the next one. All that a step has to
    wait for is done in it.
    """

    def __init__(self, steps: Sequence[int]) -> None:
        self._steps = steps or [0]
        self._due: dict[int, int] = {}

    def begin(self, moves: Moves, step: int) -> None:
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
