"""A figure of a real run beside what simulations make of it: error, noise, interval."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from simkv.validation.bootstrap import mean_interval

#: The cost model that is judged; others stand beside it.
JUDGED_MODEL = "profile"


@dataclass(frozen=True)
class FigureComparison:
    """A figure of a run, and what each cost model makes of it.

    Of a run that was served more than once, ``real`` is the mean and ``repeats`` are all of them.
    ``name`` is that of a figure (``makespan_s``), or of a metric and a statistic (``ttft_ms.p99``).
    ``interval`` is what the profile's own error makes of the simulated one.
    """

    name: str
    real: float
    simulated: dict[str, float]
    repeats: list[float] = field(default_factory=list)
    interval: tuple[float, float] | None = None

    @property
    def metric(self) -> str:
        return self.name.partition(".")[0]

    @property
    def statistic(self) -> str:
        """Empty for a figure that is not one of a metric."""
        return self.name.partition(".")[2]

    @property
    def predicted(self) -> float:
        """What the judged profile makes of it."""
        return self.simulated[JUDGED_MODEL]

    @property
    def held(self) -> bool | None:
        """Whether the run lies in the interval that the profile's error gives, if it gives one."""
        if self.interval is None:
            return None
        return self.interval[0] <= self.real <= self.interval[1]

    @property
    def noise(self) -> float | None:
        """The largest relative difference between two of the repeats (A/A)."""
        if len(self.repeats) < 2:
            return None
        difference = relative_error(max(self.repeats), min(self.repeats))
        return float("inf") if difference is None else difference

    def error(self, model: str = JUDGED_MODEL) -> float | None:
        """Relative error of a model; None where the run has 0 and the model has not."""
        return relative_error(self.simulated[model], self.real)

    def error_interval(self, model: str = JUDGED_MODEL) -> tuple[float, float] | None:
        """Between what errors of the model 95 of 100 samples of repeats lie; None for one run."""
        ends = mean_interval(self.repeats)
        if ends is None or not ends[0]:
            return None
        found = [self.simulated[model] / end - 1.0 for end in ends]
        return min(found), max(found)

    @property
    def error_pct(self) -> float:
        """The profile's error in per cent; infinite where the run has 0 and the profile has not."""
        error = self.error()
        return float("inf") if error is None else 100 * error


def relative_error(found: float, real: float) -> float | None:
    """Relative error; 0 where both are 0, None where only the real one is."""
    if real == 0.0:
        return 0.0 if found == 0.0 else None
    return found / real - 1.0


def format_error(error: float | None) -> str:
    """A relative error as a percentage with its sign."""
    return "-" if error is None else f"{100 * error:+.1f} %"


def markdown(
    head: Sequence[str], rows: Iterable[Sequence[str]], texts: int | None = None
) -> Iterator[str]:
    """Lines of a Markdown table; columns after the first ``texts`` are numbers, to the right."""
    rules = ["---" if texts is None or i < texts else "---:" for i in range(len(head))]
    for row in (head, rules, *rows):
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |"
