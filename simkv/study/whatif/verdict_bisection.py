"""Where does the verdict flip? One workload over the range of a knob, or across variants.

The answer need not be monotone. So a grid is sampled first, and then every interval whose ends
differ is halved until they are neighbours. What lies between two samples that agree is not known.
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
#: From this ratio of the ends on, a grid is even in the logarithm.
MIN_LOG_RATIO = 16
#: A range of fractions is cut into so many steps, unless told otherwise.
DEFAULT_STEPS = 1000
#: A range may not have more values than this.
MAX_VALUES = 10_000_000


@dataclass(frozen=True)
class SteppedRange:
    """The values ``low``, ``low + step``, … up to ``high``."""

    low: float
    high: float
    step: float

    @property
    def last(self) -> int:
        """Index of the highest value."""
        return int((self.high - self.low) / self.step + 1e-9)

    def value(self, index: int) -> float:
        value = self.low + index * self.step
        return value if isinstance(value, int) else round(value, 10)

    def grid(self, samples: int) -> list[int]:
        """About ``samples`` indexes from the first to the last value, both among them."""
        last, parts = self.last, max(samples - 1, 1)
        if self.low > 0 and self.high >= MIN_LOG_RATIO * self.low:
            ratio = self.high / self.low
            values = (self.low * ratio ** (part / parts) for part in range(parts + 1))
            indexes = {round((value - self.low) / self.step) for value in values}
        else:
            indexes = {round(last * part / parts) for part in range(parts + 1)}
        return sorted({0, last} | {min(index, last) for index in indexes})


@dataclass(frozen=True)
class TriedValue:
    """One value that was tried: its figures, or why the scenario refuses it.

    ``state`` is what may flip: the verdict, or whether a condition holds.
    """

    value: Any
    state: str
    figures: RunFigures | None
    refused: str = ""


@dataclass(frozen=True)
class Flip:
    """Two neighbouring values that do not agree."""

    low: TriedValue
    high: TriedValue


@dataclass(frozen=True)
class Flips:
    """All that was tried, in order, and where it flips.

    ``values`` is how many values there are, of which ``sampled`` were tried at first. ``complete``
    is false if the limit on runs came before every flip was between neighbours.
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
    """``path=low..high`` or ``path=a,b,c``. Raises InputError if it is neither."""
    axis = parse_axis(text)
    if axis.span is None:
        return axis.path, axis.values
    if axis.span.log:
        raise InputError(f"--over {text}: expected LOW..HIGH, or values as in 16,32,64")
    low, high = axis.span.ends
    if step is None:
        step = 1 if axis.span.whole else (high - low) / DEFAULT_STEPS
    elif axis.span.whole and float(step).is_integer():
        step = int(step)
    if not 0 < step <= high - low:
        raise InputError(f"--step {step:g}: expected more than 0 and at most {high - low:g}")
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
    """Where the verdict, or ``when``, flips over the values of the field at ``path``.

    Of a range some ``samples`` are tried first and every flip is then narrowed down to neighbours;
    of a list every value is tried. Raises InputError if there is no such field.
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
        tell(f"{path}: {len(known)} values tried, {len(wanted)} more")
        tried = try_([values.value(index) for index in wanted])
        complete = len(tried) == len(wanted)
        known.update(zip(wanted, tried, strict=False))
        wanted = [
            (low + high) // 2
            for low, high in pairwise(sorted(known))
            if known[low].state != known[high].state and high - low > 1
        ]
    tried = [known[index] for index in sorted(known)]
    return _report(path, tried, values.last + 1, len(grid), complete, evaluator.runs)


def find_variant_flips(
    scenario: Scenario, evaluator: Evaluator, when: RunCondition | None = None
) -> Flips:
    """The same workload and knobs under all variants that differ, in their order."""
    names = find_engine_spec(scenario.engine).distinct_variants
    return find_flips(scenario, "engine.variant", names, evaluator, when)


def _try(
    scenario: Scenario,
    path: str,
    evaluator: Evaluator,
    when: RunCondition | None,
    values: Sequence[Any],
) -> list[TriedValue]:
    """Run the scenario with each value that it takes, until the limit on runs comes."""
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
        pass  # the caller sees that some are missing
    return samples


def _state(figures: RunFigures, when: RunCondition | None) -> str:
    if when is None:
        return figures.verdict
    return when.text if when.is_met(figures) else f"not {when.text}"


def _report(
    path: str, tried: list[TriedValue], values: int, sampled: int, complete: bool, runs: int
) -> Flips:
    if not tried:
        raise TooManyRuns(f"{runs} runs are not enough for this")
    if all(sample.figures is None for sample in tried):
        raise InputError(f"{path}: no value is allowed: {tried[0].refused}")
    flips = tuple(Flip(a, b) for a, b in pairwise(tried) if a.state != b.state)
    return Flips(path, tuple(tried), flips, values, sampled, complete, runs)
