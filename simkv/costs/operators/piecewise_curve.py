"""A time as a straight-lined function of one number, and the arithmetic of such functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from simkv.costs.interpolation import interpolate


@dataclass(frozen=True)
class Curve:
    """Seconds ``ys`` at strictly rising ``xs``: lines between, flat below, the last line beyond."""

    xs: tuple[float, ...]
    ys: tuple[float, ...]

    def __call__(self, x: float) -> float:
        return interpolate(self.xs, self.ys, x)

    def times(self, factor: float) -> Curve:
        """So many of it."""
        return Curve(self.xs, tuple(factor * y for y in self.ys))

    def of(self, per_x: float) -> Curve:
        """The same as a function of something of which each unit is ``per_x`` of its own."""
        return Curve(tuple(x / per_x for x in self.xs), self.ys)

    def at_least(self, seconds: float) -> Curve:
        """Nowhere below so many seconds."""
        return Curve(self.xs, tuple(max(y, seconds) for y in self.ys))


def make_curve(points: Mapping[float, float]) -> Curve:
    """The curve through points, in any order."""
    xs = sorted(points)
    return Curve(tuple(float(x) for x in xs), tuple(float(points[x]) for x in xs))


def sum_curves(curves: Iterable[Curve]) -> Curve:
    """The sum, exact at every point of any of them."""
    parts = list(curves)
    xs = tuple(sorted({x for part in parts for x in part.xs}))
    return Curve(xs, tuple(sum(part(x) for part in parts) for x in xs))


def make_nondecreasing(points: Mapping[float, float]) -> dict[float, float]:
    """Each point as the least of itself and all further on: a batch can be padded to a larger."""
    found: dict[float, float] = {}
    least = float("inf")
    for x in sorted(points, reverse=True):
        least = min(least, points[x])
        found[x] = least
    return found


def sample_function(function: Callable[[float], float], xs: Iterable[float]) -> Curve:
    """The function at so many points."""
    return make_curve({x: function(x) for x in xs})


def round_to_four_digits(values: Iterable[float]) -> list[float]:
    """Four figures each: tables are no more exact."""
    return [float(f"{value:.4g}") for value in values]
