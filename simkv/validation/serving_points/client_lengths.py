"""Sample the same prompt and output lengths as the benchmark's client.

``benchmark_serving.py`` of InferenceMAX (github.com/kimbochen/bench_serving, since 2026-01-21 in
SemiAnalysisAI/InferenceX) seeds numpy's global generator with 0. It samples first the lengths of
all prompts and then the lengths of all outputs, uniformly from ``int(0.8 L)`` to ``L``.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

SEED = 0
#: Range of lengths as fractions of the stated length (random-range-ratio 0.8).
INFERENCEMAX_RANGE = (0.8, 1.0)
#: Range if the variation is unknown, and range if all lengths equal the stated length.
APPROXIMATE_RANGE = (0.985, 1.015)
EXACT_RANGE = (1.0, 1.0)


@lru_cache(maxsize=64)
def sample_lengths(
    prompts: int, isl: int, osl: int, shares: tuple[float, float] = INFERENCEMAX_RANGE
) -> tuple[tuple[int, int], ...]:
    """Return the numbers of prompt tokens and output tokens of each request."""
    generator = np.random.RandomState(SEED)
    columns = []
    for length in (isl, osl):
        low, high = (int(length * share) for share in shares)
        columns.append(generator.randint(max(low, 1), high + 1, size=prompts).tolist())
    return tuple(zip(*columns, strict=True))
