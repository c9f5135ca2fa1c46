"""Confidence intervals of errors, computed by bootstrap.

Consecutive steps are correlated, so blocks of steps are resampled. With few repeats of a run, all
possible samples of the repeats are enumerated.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations_with_replacement
from math import factorial, isqrt, prod, sqrt

import numpy as np
import numpy.typing as npt

ConfidenceInterval = tuple[float, float]
#: Number of samples, minimum number of blocks per sample (if there are enough steps), and the
#: confidence level.
BOOTSTRAP_SAMPLES, MIN_BLOCKS, CONFIDENCE = 200, 4, 0.95


def step_error_intervals(
    errors: npt.NDArray[np.float64], seed: int = 0
) -> dict[str, ConfidenceInterval]:
    """Return confidence intervals of the median and P95 of the absolute errors, and of the bias.

    ``errors`` contains the relative errors in the order of the steps. Blocks of steps are resampled
    by circular bootstrap (Politis and Romano 1992). The result is empty for a single step. With few
    steps, the interval of P95 is too low.
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
    """Return the fraction of samples to exclude at each end of an interval of ``blocks`` blocks.

    This is the expanded percentile interval of Hesterberg (2015). It corrects for the small spread
    of samples of few blocks, and for the long tails of Student's t distribution.
    """
    from scipy.special import ndtr, stdtrit

    wide = stdtrit(blocks - 1, 0.5 * (1 - CONFIDENCE))
    return float(ndtr(wide * sqrt(blocks / (blocks - 1))))


def _between(values: npt.NDArray[np.float64], below: float) -> ConfidenceInterval:
    low, high = np.quantile(values, (below, 1 - below))
    return float(low), float(high)


def mean_interval(values: Sequence[float]) -> ConfidenceInterval | None:
    """Return the confidence interval of the mean over several repeats, or None for a single
    repeat.
    """
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
    """Return the number of different orders of a sample of repeats.

    A sample may contain a repeat several times.
    """
    counts = [drawn.count(one) for one in set(drawn)]
    return factorial(len(drawn)) / prod(map(factorial, counts))
