# mypyc: compile
"""Linear interpolation between measured points."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence


def bracket(points: Sequence[float], x: float) -> tuple[int, int, float]:
    """Return the indices of the two points around ``x``, and the position of ``x`` between them.

    The position is 0 at and below the left point, 1 at the right point, and larger than 1 above the
    last point. ``points`` must increase strictly.
    """
    if len(points) == 1 or x <= points[0]:
        return 0, 0, 0.0
    right = min(bisect_right(points, x), len(points) - 1)
    left = right - 1
    return left, right, (x - points[left]) / (points[right] - points[left])


def lerp(left: float, right: float, share: float) -> float:
    """Return the value at fraction ``share`` between ``left`` and ``right``."""
    return left + share * (right - left)


def interpolate(xs: Sequence[float], ys: Sequence[float], x: float) -> float:
    """Return the linearly interpolated value at ``x``.

    The value is constant below the first point and extrapolated linearly above the last point.
    """
    left, right, share = bracket(xs, x)
    return lerp(ys[left], ys[right], share)


def extrapolate(xs: Sequence[float], ys: Sequence[float], x: float) -> float:
    """Return the linearly interpolated value at ``x``, extrapolated at both ends.

    Above the last point, the slope is the mean slope of the upper half of the x range.
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
