"""Straight lines between measured points."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence


def bracket(points: Sequence[float], x: float) -> tuple[int, int, float]:
    """Indices of the points around ``x``, and how far ``x`` is from the first to the second (0..1).

    Below the first point it is the first point; above the last the last line goes on, so the share
    is larger than 1. ``points`` rise strictly.
    """
    if len(points) == 1 or x <= points[0]:
        return 0, 0, 0.0
    right = min(bisect_right(points, x), len(points) - 1)
    left = right - 1
    return left, right, (x - points[left]) / (points[right] - points[left])


def lerp(left: float, right: float, share: float) -> float:
    """The value ``share`` of the way from ``left`` to ``right``."""
    return left + share * (right - left)


def interpolate(xs: Sequence[float], ys: Sequence[float], x: float) -> float:
    """The value at ``x`` of the lines through the points; flat below the first."""
    left, right, share = bracket(xs, x)
    return lerp(ys[left], ys[right], share)


def extrapolate(xs: Sequence[float], ys: Sequence[float], x: float) -> float:
    """The same, but the lines go on at both ends; a single point counts everywhere.

    Below it is the nearest line. Above it is that of the last octave, from half of the last point
    on: products of matrices grow in steps, and between two points of one step nothing grows.
    """
    if len(xs) == 1:
        return ys[0]
    if x > xs[-1]:
        half = min(bisect_right(xs, xs[-1] / 2), len(xs) - 1)
        left, right = max(half - 1, 0), len(xs) - 1
        slope = (ys[right] - ys[left]) / (xs[right] - xs[left])
        return ys[right] + slope * (x - xs[right])
    right = min(max(bisect_left(xs, x), 1), len(xs) - 1)
    left = right - 1
    slope = (ys[right] - ys[left]) / (xs[right] - xs[left])
    return ys[left] + slope * (x - xs[left])
