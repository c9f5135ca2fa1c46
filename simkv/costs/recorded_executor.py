"""Executor that replays recorded step times."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from simkv.costs.step_load import StepLoad


class RecordedExecutor:
    """Executor with recorded durations (s) of steps and idle passes, in the recorded order.

    Raises RuntimeError if the run requests more durations than were recorded.
    """

    def __init__(self, steps: Iterable[float], idles: Iterable[float]) -> None:
        self._steps = deque(steps)
        self._idles = deque(idles)

    def run(self, load: StepLoad) -> float:  # noqa: ARG002
        if not self._steps:
            raise RuntimeError("the simulation has more steps than the recording")
        return self._steps.popleft()

    def forecast_steps(self, load: StepLoad, steps: int) -> list[float]:  # noqa: ARG002
        return []

    def ran(self, load: StepLoad, seconds: Sequence[float]) -> None:  # noqa: ARG002
        return

    def idle(self) -> float:
        if not self._idles:
            raise RuntimeError("the simulation has more idle passes than the recording")
        return self._idles.popleft()
