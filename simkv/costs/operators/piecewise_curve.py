"""Piecewise linear functions of one variable and operations on them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from simkv.costs.interpolation import interpolate


@dataclass(frozen=True)
class Curve:
    """A piecewise linear function with values ``ys`` (seconds) at increasing ``xs``.

    The function is constant below the first x and continues linearly above the last x.
    """

    xs: tuple[float, ...]
    ys: tuple[float, ...]

    def __call__(self, x: float) -> float:
        return interpolate(self.xs, self.ys, x)

    def times(self, factor: float) -> Curve:
        """Return the curve with all values multiplied by ``factor``."""
        return Curve(self.xs, tuple(factor * y for y in self.ys))

    def of(self, per_x: float) -> Curve:
        """Return the curve as a function of another variable, which is x divided by ``per_x``."""
        return Curve(tuple(x / per_x for x in self.xs), self.ys)

    def at_least(self, seconds: float) -> Curve:
        """Return the curve with a lower bound of ``seconds``."""
        return Curve(self.xs, tuple(max(y, seconds) for y in self.ys))


def make_curve(points: Mapping[float, float]) -> Curve:
    """Return the curve through ``points``, a mapping of x to y in any order."""
    xs = sorted(points)
    return Curve(tuple(float(x) for x in xs), tuple(float(points[x]) for x in xs))


def sum_curves(curves: Iterable[Curve]) -> Curve:
    """Return the sum of curves, exact at all points of each curve."""
    parts = list(curves)
    xs = tuple(sorted({x for part in parts for x in part.xs}))
    return Curve(xs, tuple(sum(part(x) for part in parts) for x in xs))


def make_nondecreasing(points: Mapping[float, float]) -> dict[float, float]:
    """Reduce the y of each point to the minimum over all points with an equal or larger x."""
    found: dict[float, float] = {}
    least = float("inf")
    for x in sorted(points, reverse=True):
        least = min(least, points[x])
        found[x] = least
    return found


def round_to_four_digits(values: Iterable[float]) -> list[float]:
    """Round values to four significant digits, the accuracy of the tables."""
    return [float(f"{value:.4g}") for value in values]
