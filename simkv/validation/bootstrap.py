"""How far an error is from what another sample of runs and steps would have shown: the bootstrap.

Steps that follow each other are alike, so blocks of them are drawn; of a few repeats of a run every
sample that could be drawn counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations_with_replacement
from math import factorial, isqrt, prod, sqrt

import numpy as np
import numpy.typing as npt

ConfidenceInterval = tuple[float, float]
#: Samples drawn, the fewest blocks that a sample is made of if there are as many steps, and the
#: share of samples that lies between the ends.
BOOTSTRAP_SAMPLES, MIN_BLOCKS, CONFIDENCE = 200, 4, 0.95


def step_error_intervals(
    errors: npt.NDArray[np.float64], seed: int = 0
) -> dict[str, ConfidenceInterval]:
    """Ends of the median and P95 of the absolute errors and of the bias, over blocks of steps.

    ``errors`` are relative and in the order of the steps. Blocks go on from the last step to the
    first (Politis and Romano 1992), so that each step is drawn as often as any other; there are
    about as many as each is long. Empty for a single step, of which nothing can be told; of few,
    the ends of P95 lie too low, since nothing above the largest can be drawn.
    """
    count = len(errors)
    if count < 2:
        return {}
    length = max(1, min(isqrt(count), count // MIN_BLOCKS))
    blocks = -(-count // length)
    starts = np.random.default_rng(seed).integers(0, count, (BOOTSTRAP_SAMPLES, blocks))
    places = (starts[:, :, None] + np.arange(length)) % count
    drawn = errors[places.reshape(BOOTSTRAP_SAMPLES, -1)[:, :count]]
    middle, high = np.percentile(np.abs(drawn), (50, 95), axis=1)
    found = {"median": middle, "p95": high, "bias": drawn.mean(axis=1)}
    below = _below(blocks)
    return {name: _between(values, below) for name, values in found.items()}


def _below(blocks: int) -> float:
    """The share of samples to leave out at each end.

    Less than (1 - SHARE) / 2: samples of so few blocks spread by sqrt((blocks - 1) / blocks) of
    what their figures do, and Student's t has longer tails than they (the expanded percentile
    interval of Hesterberg 2015).
    """
    from scipy.special import ndtr, stdtrit

    wide = stdtrit(blocks - 1, 0.5 * (1 - CONFIDENCE))
    return float(ndtr(wide * sqrt(blocks / (blocks - 1))))


def _between(values: npt.NDArray[np.float64], below: float) -> ConfidenceInterval:
    low, high = np.quantile(values, (below, 1 - below))
    return float(low), float(high)


def mean_interval(values: Sequence[float]) -> ConfidenceInterval | None:
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
    low, high = np.searchsorted(shares, (0.5 * (1 - CONFIDENCE), 0.5 * (1 + CONFIDENCE)))
    return float(found[low]), float(found[min(high, len(found) - 1)])


def _ways(drawn: Sequence[int]) -> float:
    """In how many orders these repeats could have been drawn."""
    counts = [drawn.count(one) for one in set(drawn)]
    return factorial(len(drawn)) / prod(map(factorial, counts))
