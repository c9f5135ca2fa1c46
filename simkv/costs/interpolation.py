# mypyc: compile
"""Linear interpolation between measured points."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence


def bracket(points: Sequence[float], x: float) -> tuple[int, int, float]:
    """Return the indices of the two points around ``x``, and the position of ``x`` between them.

    The position is 0 at the left point and 1 at the right point; it exceeds 1 above the last point.
    Below the first point, the position is 0. ``points`` must increase strictly.
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
    """Return the linearly interpolated value at ``x``, constant below the first point.

    Above the last point, the last segment is extrapolated.
    """
    left, right, share = bracket(xs, x)
    return lerp(ys[left], ys[right], share)


def extrapolate(xs: Sequence[float], ys: Sequence[float], x: float) -> float:
    """Return the linearly interpolated value at ``x``, extrapolated at both ends.

    Above the last point, the slope is the mean slope between half of the last x and the last x. A
    single point gives a constant.
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
