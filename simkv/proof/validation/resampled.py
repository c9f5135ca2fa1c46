"""How far an error is from what another sample of runs and steps would have shown: the bootstrap.

Steps that follow each other are alike, so blocks of them are drawn; of a few repeats of a run every
sample that could be drawn counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations_with_replacement
from math import factorial, prod

import numpy as np
import numpy.typing as npt

Ends = tuple[float, float]
#: Samples drawn, steps of a block, and the share of samples that lies between the ends.
SAMPLES, BLOCK, SHARE = 200, 16, 0.95


def step_ends(errors: npt.NDArray[np.float64], seed: int = 0) -> dict[str, Ends]:
    """Ends of the median and P95 of the absolute errors and of the bias, over blocks of steps.

    ``errors`` are relative and in the order of the steps.
    """
    random = np.random.default_rng(seed)
    count = len(errors)
    length = min(BLOCK, count)
    starts = random.integers(0, count - length + 1, (SAMPLES, -(-count // length)))
    places = (starts[:, :, None] + np.arange(length)).reshape(SAMPLES, -1)[:, :count]
    drawn = errors[places]
    middle, high = np.percentile(np.abs(drawn), (50, 95), axis=1)
    return {"median": _ends(middle), "p95": _ends(high), "bias": _ends(drawn.mean(axis=1))}


def _ends(found: npt.NDArray[np.float64]) -> Ends:
    low, high = np.percentile(found, (50 * (1 - SHARE), 50 * (1 + SHARE)))
    return float(low), float(high)


def means(values: Sequence[float]) -> Ends | None:
    """Ends of the mean of some repeats; None for a single one, of which nothing can be told."""
    count = len(values)
    if count < 2:
        return None
    weighed = sorted(
        (sum(values[i] for i in drawn) / count, _ways(drawn))
        for drawn in combinations_with_replacement(range(count), count)
    )
    found = np.array([mean for mean, _ in weighed])
    shares = np.cumsum([ways for _, ways in weighed]) / count**count
    low, high = np.searchsorted(shares, (0.5 * (1 - SHARE), 0.5 * (1 + SHARE)))
    return float(found[low]), float(found[min(high, len(found) - 1)])


def _ways(drawn: Sequence[int]) -> float:
    """In how many orders these repeats could have been drawn."""
    counts = [drawn.count(one) for one in set(drawn)]
    return factorial(len(drawn)) / prod(map(factorial, counts))
