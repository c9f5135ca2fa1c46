"""Compare a metric of a real run with its simulated values: error, noise and interval."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from simkv.validation.bootstrap import mean_interval

#: Name of the cost model that is evaluated; all other cost models are for comparison.
JUDGED_MODEL = "profile"


@dataclass(frozen=True)
class FigureComparison:
    """A metric of a real run, and its simulated value with each cost model.

    ``real`` is the mean over the runs, and ``repeats`` contains the value of each run. ``name`` is
    the name of a metric (``makespan_s``), or of a metric and a statistic (``ttft_ms.p99``).
    ``interval`` contains the values that are possible within the error of the profile.
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
        """Statistic of a metric, or "" if the metric has no statistics."""
        return self.name.partition(".")[2]

    @property
    def predicted(self) -> float:
        """Value simulated with the evaluated profile."""
        return self.simulated[JUDGED_MODEL]

    @property
    def held(self) -> bool | None:
        """Whether ``interval`` contains the real value, or None without an interval."""
        if self.interval is None:
            return None
        return self.interval[0] <= self.real <= self.interval[1]

    @property
    def noise(self) -> float | None:
        """Largest relative difference between two repeats of the run, or None without repeats."""
        if len(self.repeats) < 2:
            return None
        difference = relative_error(max(self.repeats), min(self.repeats))
        return float("inf") if difference is None else difference

    def error(self, model: str = JUDGED_MODEL) -> float | None:
        """Return the relative error of a cost model, or None if only the real value is 0."""
        return relative_error(self.simulated[model], self.real)

    def error_interval(self, model: str = JUDGED_MODEL) -> tuple[float, float] | None:
        """Return the 95 % confidence interval of a cost model's relative error.

        The interval is computed by resampling the repeats.

        Returns None with fewer than two runs, or if a measured value is 0.
        """
        ends = mean_interval(self.repeats)
        if ends is None or not ends[0]:
            return None
        found = [self.simulated[model] / end - 1.0 for end in ends]
        return min(found), max(found)

    @property
    def error_pct(self) -> float:
        """Error of the evaluated profile in percent, or infinity if only the real value is 0."""
        error = self.error()
        return float("inf") if error is None else 100 * error


def relative_error(found: float, real: float) -> float | None:
    """Return the relative error of ``found``; 0 if both values are 0, and None if only ``real`` is
    0.
    """
    if real == 0.0:
        return 0.0 if found == 0.0 else None
    return found / real - 1.0


def format_error(error: float | None) -> str:
    """Return a relative error as a percentage with its sign."""
    return "-" if error is None else f"{100 * error:+.1f} %"


def markdown(
    head: Sequence[str], rows: Iterable[Sequence[str]], texts: int | None = None
) -> Iterator[str]:
    """Yield lines of a Markdown table. Only the first ``texts`` columns are left-aligned; the
    default is all.
    """
    rules = ["---" if texts is None or i < texts else "---:" for i in range(len(head))]
    for row in (head, rules, *rows):
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |"
