"""Parse the settings of a sweep and their values, in the syntax of ``--over``.

Example:

    blocks = parse_axis("engine.num_gpu_blocks=256..1024:256")
    grid([blocks, parse_axis("workload.arrivals.seed=1,2")])  # 4 * 2 points
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from itertools import product
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from ruamel.yaml import YAML

from simkv.core.errors import InputError

#: Maximum number of combinations; a larger number is probably a typo, or should be split into
#: several sweeps.
MAX_POINTS = 100_000
#: Name of the axis that selects variants of the scenario instead of setting a field.
VARIANTS_AXIS = "variants"

KnobValue = str | int | float | bool | None
KnobSettings = dict[str, KnobValue]

_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_RANGE = re.compile(rf"({_NUMBER})\.\.({_NUMBER})(?::(.*))?")
_FORMS = "LOW..HIGH:STEP, LOW..HIGH:n=COUNT or LOW..HIGH:log=COUNT"


@dataclass(frozen=True)
class ValueRange:
    """Range of values from ``low`` to ``high``, for sampling or searching.

    ``whole`` restricts the range to integers. With ``log``, values are evenly spaced on a
    logarithmic scale.
    """

    low: float
    high: float
    whole: bool
    log: bool

    @property
    def ends(self) -> tuple[float, float]:
        """Lowest and highest value. With ``whole``, both are integers."""
        return (int(self.low), int(self.high)) if self.whole else (self.low, self.high)

    def at(self, share: float) -> float:
        """Return the value at the fraction ``share`` (0 <= share < 1) of the range."""
        low, high = self.low, self.high + self.whole
        value = low * (high / low) ** share if self.log else low + (high - low) * share
        return min(math.floor(value), int(self.high)) if self.whole else _tidy(value)


@dataclass(frozen=True)
class Axis:
    """A setting, by its path as in ``--set``, and its ``values``.

    In samples and searches, a continuous range ``span`` can replace the values.
    """

    path: str
    values: tuple[KnobValue, ...] = ()
    span: ValueRange | None = None

    def at(self, share: float) -> KnobValue:
        """Return the value at the fraction ``share`` (0 <= share < 1) of the axis."""
        return self.span.at(share) if self.span else self.values[int(share * len(self.values))]


def parse_axis(text: str) -> Axis:
    """Parse ``path=values``: a list ``a,b,c`` of YAML scalars, or a range of numbers.

    A range has one of the forms ``LOW..HIGH``, ``LOW..HIGH:log``, ``LOW..HIGH:STEP``,
    ``LOW..HIGH:n=COUNT`` and ``LOW..HIGH:log=COUNT``. Both ends are included. Raises InputError if
    the text is invalid.
    """
    path, equals, values = text.partition("=")
    path, values = path.strip(), values.strip()
    if not equals or not values or not all(path.split(".")):
        raise InputError(f"--over {text}: expected path=values, such as engine.block_size=16,32")
    found = _RANGE.fullmatch(values)
    axis = _range(path, text, *found.groups()) if found else Axis(path, _scalars(values, text))
    return _checked(axis, text)


def make_axis(path: str, values: float | str | Iterable[Any]) -> Axis:
    """Return an axis from one value, a list of values, or text in the syntax of the command line.

    Raises InputError if there is no value, a duplicate, or a value that is not a YAML scalar.
    """
    if isinstance(values, str):
        return parse_axis(f"{path}={values}")
    several = values if isinstance(values, Iterable) else (values,)
    plain = tuple(value.item() if isinstance(value, np.generic) else value for value in several)
    text = f"{path}={','.join(map(str, plain))}"
    if not all(isinstance(value, KnobValue) for value in plain):
        raise InputError(f"--over {text}: expected numbers, strings, true, false or null")
    return _checked(Axis(path, plain), text)


def _checked(axis: Axis, text: str) -> Axis:
    # 1, 1.0 and true are equal in Python but not in YAML.
    if len({format_assignment("", value) for value in axis.values}) < len(axis.values):
        raise InputError(f"--over {text}: a value is listed twice")
    if not axis.values and not axis.span:
        raise InputError(f"--over {text}: expected at least one value")
    if axis.path == VARIANTS_AXIS and not all(isinstance(value, str) for value in axis.values):
        raise InputError(f"--over {text}: expected names of variants")
    return axis


def _scalars(values: str, text: str) -> tuple[KnobValue, ...]:
    try:
        found = YAML(typ="safe", pure=True).load(f"[{values}]")
    except Exception as error:  # the parser can raise many types of errors
        raise InputError(f"--over {text}: the values are not valid YAML") from error
    if not all(isinstance(value, KnobValue) for value in found):
        raise InputError(f"--over {text}: expected a list a,b,c of scalars, or {_FORMS}")
    return tuple(found)


def _range(path: str, text: str, first: str, last: str, form: str | None) -> Axis:
    low, high = Decimal(first), Decimal(last)
    whole = all(re.fullmatch(r"[-+]?\d+", end) for end in (first, last))
    if low >= high:
        raise InputError(f"--over {text}: the lower end {first} must be below {last}")
    if form is not None and form.startswith("log") and low <= 0:
        raise InputError(f"--over {text}: a logarithmic range must begin above 0; found {first}")
    if form is None or form == "log":
        return Axis(path, span=ValueRange(float(low), float(high), whole, form == "log"))
    name, _, count = form.rpartition("=")
    if name in ("n", "log") and count.isdecimal():
        numbers = _between(low, high, int(count), name == "log", whole, text)
    elif re.fullmatch(_NUMBER, form) and Decimal(form) > 0:
        if (high - low) / Decimal(form) >= MAX_POINTS:
            raise InputError(f"--over {text}: more than {MAX_POINTS:,} values")
        steps = int((high - low) / Decimal(form))
        exact = [low + step * Decimal(form) for step in range(steps + 1)]
        whole = whole and re.fullmatch(r"\+?\d+", form) is not None
        numbers = [int(value) if whole else float(value) for value in exact]
    else:
        raise InputError(f"--over {text}: expected {_FORMS}")
    return Axis(path, tuple(numbers))


def _between(
    low: Decimal, high: Decimal, count: int, log: bool, whole: bool, text: str
) -> list[float]:
    """Return ``count`` evenly spaced values from ``low`` to ``high``, on a logarithmic scale with
    ``log``.
    """
    if not 2 <= count <= MAX_POINTS:
        raise InputError(f"--over {text}: expected a count from 2 to {MAX_POINTS:,}")
    shares = [Decimal(step) / (count - 1) for step in range(count)]
    if log:
        ratio = float(high / low)
        values = [_tidy(float(low) * ratio ** float(share)) for share in shares]
        values[0], values[-1] = float(low), float(high)
    else:
        values = [_tidy(float(low + (high - low) * share)) for share in shares]
    if not whole:
        return values
    rounded: list[float] = [round(value) for value in values]
    if len(set(rounded)) < count:
        raise InputError(
            f"--over {text}: the range has fewer than {count} whole numbers; use a smaller "
            f"count, or write {low}.0 to use fractions"
        )
    return rounded


def _tidy(value: float) -> float:
    """Return the value rounded to 12 digits, so that it is the same on any machine."""
    return float(f"{value:.12g}")


def format_assignment(path: str, value: Any) -> str:
    """Format ``path=value`` as ``--set`` reads it."""
    if isinstance(value, float) and not math.isfinite(value):
        shown = ".nan" if math.isnan(value) else ".inf" if value > 0 else "-.inf"
    else:
        shown = json.dumps(value)
        if isinstance(value, str) and re.fullmatch(r"[A-Za-z][\w./-]*", value):
            shown = value if YAML(typ="safe", pure=True).load(value) == value else shown
    return f"{path}={shown}"


def grid(axes: Sequence[Axis]) -> list[KnobSettings]:
    """Return all combinations of the values. The last axis changes fastest.

    Raises InputError if an axis has no discrete values, or if there are too many combinations.
    """
    whole = [_one_by_one(axis) for axis in axes]
    count = math.prod(len(axis.values) for axis in whole)
    if count > MAX_POINTS:
        raise InputError(
            f"--over: the grid has {count:,} points; expected at most {MAX_POINTS:,}. To run a "
            "random part of the grid, use --sample"
        )
    paths = [axis.path for axis in whole]
    return [
        dict(zip(paths, values, strict=True))
        for values in product(*(axis.values for axis in whole))
    ]


def _one_by_one(axis: Axis) -> Axis:
    span = axis.span
    if span is None:
        return axis
    if not span.whole or span.log or span.high - span.low >= MAX_POINTS:
        raise InputError(
            f"--over {axis.path}: a grid needs {_FORMS}; {span.low:g}..{span.high:g} without a "
            "step or count requires --sample"
        )
    low, high = span.ends
    return Axis(axis.path, tuple(range(int(low), int(high) + 1)))


@dataclass(frozen=True)
class SampleSpec:
    """Number of combinations to sample, and the method: ``lhs`` (Latin hypercube) or ``random``."""

    kind: Literal["random", "lhs"]
    size: int


def parse_sample(text: str) -> SampleSpec:
    """Parse ``random:N`` or ``lhs:N``. Raises InputError for any other text."""
    kind, _, size = text.partition(":")
    if kind not in ("random", "lhs") or not size.isdecimal() or not 0 < int(size) <= MAX_POINTS:
        raise InputError(
            f"--sample {text}: expected random:N or lhs:N with N from 1 to {MAX_POINTS:,}"
        )
    return SampleSpec("lhs" if kind == "lhs" else "random", int(size))


def sample_points(axes: Sequence[Axis], sample: SampleSpec, seed: int) -> list[KnobSettings]:
    """Sample combinations of values, independently or as a Latin hypercube."""
    shares = _shares(len(axes), sample, seed)
    return [
        {axis.path: axis.at(share) for axis, share in zip(axes, row, strict=True)}
        for row in shares.tolist()
    ]


def _shares(dimensions: int, sample: SampleSpec, seed: int) -> npt.NDArray[np.float64]:
    random = np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed)))
    if sample.kind == "random" or not dimensions:
        return random.random((sample.size, dimensions))
    from scipy.stats.qmc import LatinHypercube

    # The upper end of a cell may round to 1 in floating point.
    drawn: npt.NDArray[np.float64] = LatinHypercube(dimensions, rng=random).random(sample.size)
    return np.minimum(drawn, np.nextafter(1.0, 0.0))
