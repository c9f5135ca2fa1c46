"""Find neighbouring values of a setting, or neighbouring variants, with different verdicts.

The verdict need not be monotone. Therefore a grid of values is tried first, and every interval with
different verdicts at its ends is bisected. Changes inside an interval with equal ends are not
detected.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

from simkv.core.errors import InputError
from simkv.scenario.scenario import Scenario
from simkv.schedulers.engine_registry import find_engine_spec
from simkv.study.field_changes import NoSuchField, with_field
from simkv.study.simulation_job import SimulationJob
from simkv.study.sweep_axes import parse_axis
from simkv.study.whatif.outcome_predicate import RunCondition
from simkv.study.whatif.trial_evaluation import Evaluator, RunFigures, TooManyRuns

REFUSED = "not allowed"
#: Minimum ratio of the highest to the lowest value for a logarithmic grid.
MIN_LOG_RATIO = 16
#: Default number of steps if the ends of a range are fractions.
DEFAULT_STEPS = 1000
#: Maximum number of values in a range.
MAX_VALUES = 10_000_000


@dataclass(frozen=True)
class SteppedRange:
    """The values ``low``, ``low + step``, … up to ``high``."""

    low: float
    high: float
    step: float

    @property
    def last_index(self) -> int:
        """Index of the highest value."""
        return int((self.high - self.low) / self.step + 1e-9)

    def value(self, index: int) -> float:
        value = self.low + index * self.step
        return value if isinstance(value, int) else round(value, 10)

    def grid(self, samples: int) -> list[int]:
        """Return about ``samples`` indices, including the first and the last index."""
        last, parts = self.last_index, max(samples - 1, 1)
        if self.low > 0 and self.high >= MIN_LOG_RATIO * self.low:
            ratio = self.high / self.low
            values = (self.low * ratio ** (part / parts) for part in range(parts + 1))
            indexes = {round((value - self.low) / self.step) for value in values}
        else:
            indexes = {round(last * part / parts) for part in range(parts + 1)}
        return sorted({0, last} | {min(index, last) for index in indexes})


@dataclass(frozen=True)
class TriedValue:
    """A value that was tried, with the result of its run or the reason for its rejection.

    ``state`` is the verdict, or whether a condition is met.
    """

    value: Any
    state: str
    figures: RunFigures | None
    refused: str = ""


@dataclass(frozen=True)
class Flip:
    """Two neighbouring values with different verdicts or conditions."""

    low: TriedValue
    high: TriedValue


@dataclass(frozen=True)
class Flips:
    """The values that were tried, in ascending order, and the changes of the verdict between them.

    ``values`` is the number of possible values, and ``sampled`` is the number of values in the
    first grid. ``complete`` is false if the limit on runs ended the search.
    """

    path: str
    samples: tuple[TriedValue, ...]
    flips: tuple[Flip, ...]
    values: int
    sampled: int
    complete: bool
    runs: int


def parse_bisect_values(
    text: str, step: float | None = None
) -> tuple[str, SteppedRange | Sequence[Any]]:
    """Parse ``path=low..high`` or ``path=a,b,c``. Raises InputError for any other text."""
    axis = parse_axis(text)
    if axis.span is None:
        return axis.path, axis.values
    if axis.span.log:
        raise InputError(f"--over {text}: expected LOW..HIGH, or values such as 16,32,64")
    low, high = axis.span.ends
    if step is None:
        step = 1 if axis.span.whole else (high - low) / DEFAULT_STEPS
    elif axis.span.whole and float(step).is_integer():
        step = int(step)
    if not 0 < step <= high - low:
        raise InputError(f"--step {step:g}: must be above 0 and at most {high - low:g}")
    if (high - low) / step > MAX_VALUES:
        raise InputError(f"--over {text}: more than {MAX_VALUES:,} values; use a larger --step")
    return axis.path, SteppedRange(low, high, step)


def find_flips(
    scenario: Scenario,
    path: str,
    values: SteppedRange | Sequence[Any],
    evaluator: Evaluator,
    when: RunCondition | None = None,
    samples: int = 17,
    tell: Callable[[str], None] = lambda _: None,
) -> Flips:
    """Find where the verdict changes over the values of the field at ``path``.

    ``when`` is a condition to use instead of the verdict. ``samples`` is the number of values of a
    range to try before the bisection. Raises InputError if there is no such field.
    """
    try_ = partial(_try, scenario, path, evaluator, when)
    if not isinstance(values, SteppedRange):
        tell(f"{len(values)} values")
        tried = try_(values)
        complete = len(tried) == len(values)
        return _report(path, tried, len(values), len(values), complete, evaluator.runs)
    known: dict[int, TriedValue] = {}
    grid = wanted = values.grid(samples)
    complete = True
    while wanted and complete:
        tell(f"{path}: {len(known)} values tried, {len(wanted)} to try")
        tried = try_([values.value(index) for index in wanted])
        complete = len(tried) == len(wanted)
        known.update(zip(wanted, tried, strict=False))
        wanted = [
            (low + high) // 2
            for low, high in pairwise(sorted(known))
            if known[low].state != known[high].state and high - low > 1
        ]
    tried = [known[index] for index in sorted(known)]
    return _report(path, tried, values.last_index + 1, len(grid), complete, evaluator.runs)


def find_variant_flips(
    scenario: Scenario, evaluator: Evaluator, when: RunCondition | None = None
) -> Flips:
    """Find where the verdict changes across all distinct variants, in order."""
    names = find_engine_spec(scenario.engine).distinct_variants
    return find_flips(scenario, "engine.variant", names, evaluator, when)


def _try(
    scenario: Scenario,
    path: str,
    evaluator: Evaluator,
    when: RunCondition | None,
    values: Sequence[Any],
) -> list[TriedValue]:
    """Run the scenario with each valid value, up to the limit on runs."""
    jobs: list[SimulationJob | InputError] = []
    for value in values:
        try:
            jobs.append(evaluator.job(with_field(scenario, path, value, evaluator.folder)))
        except NoSuchField:
            raise
        except InputError as error:
            jobs.append(error)
    found = evaluator.stream(job for job in jobs if isinstance(job, SimulationJob))
    samples = []
    try:
        for value, job in zip(values, jobs, strict=True):
            if isinstance(job, InputError):
                samples.append(TriedValue(value, REFUSED, None, str(job)))
            else:
                figures = next(found)
                samples.append(TriedValue(value, _state(figures, when), figures))
    except TooManyRuns:
        pass  # the caller detects values without a result
    return samples


def _state(figures: RunFigures, when: RunCondition | None) -> str:
    if when is None:
        return figures.verdict
    return when.text if when.is_met(figures) else f"not {when.text}"


def _report(
    path: str, tried: list[TriedValue], values: int, sampled: int, complete: bool, runs: int
) -> Flips:
    if not tried:
        raise TooManyRuns(f"reached the limit of {runs} runs without a result; increase --max-runs")
    if all(sample.figures is None for sample in tried):
        raise InputError(
            f"{path}: none of the values is valid in this scenario; the first error: "
            f"{tried[0].refused}"
        )
    flips = tuple(Flip(a, b) for a, b in pairwise(tried) if a.state != b.state)
    return Flips(path, tuple(tried), flips, values, sampled, complete, runs)
