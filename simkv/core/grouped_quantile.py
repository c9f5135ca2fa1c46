"""Quantiles of values that occur several times each."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence


def quantile(values: Sequence[float], ends: Sequence[int], share: float) -> float:
    """The ``share`` quantile (0..1) of ``values`` in order; ``ends`` add up how often each occurs.

    It is linear between the samples, as numpy's by default: the median of 1, 1, 4 (values 1 and 4,
    ends 2 and 3) is 1.
    """
    place = share * (ends[-1] - 1)
    low = int(place)
    left, right = (values[bisect_right(ends, rank)] for rank in (low, min(low + 1, ends[-1] - 1)))
    return left + (right - left) * (place - low)
