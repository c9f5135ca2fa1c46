"""Quantiles of sorted values that occur several times each."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence


def quantile(values: Sequence[float], ends: Sequence[int], share: float) -> float:
    """Return the quantile ``share`` (0..1) of sorted values with repetitions.

    ``values`` are the distinct values, and ``ends`` their cumulative counts. Interpolates linearly,
    as numpy does by default.
    """
    # For example, the median of 1, 1, 4 (values 1 and 4, ends 2 and 3) is 1.
    place = share * (ends[-1] - 1)
    low = int(place)
    left, right = (values[bisect_right(ends, rank)] for rank in (low, min(low + 1, ends[-1] - 1)))
    return left + (right - left) * (place - low)
