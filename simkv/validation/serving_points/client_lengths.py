"""The prompts and answers of the benchmark's client, token for token.

``benchmark_serving.py`` of InferenceMAX (github.com/kimbochen/bench_serving, since 2026-01-21 in
SemiAnalysisAI/InferenceX) seeds numpy's global generator with 0 and draws all prompts' lengths,
then all answers', evenly from ``int(0.8 L)`` to ``L``.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

SEED = 0
#: Between which shares of the stated length lengths lie (random-range-ratio 0.8).
INFERENCEMAX_RANGE = (0.8, 1.0)
#: The same where nobody wrote down how lengths vary, and where all are as stated.
APPROXIMATE_RANGE = (0.985, 1.015)
EXACT_RANGE = (1.0, 1.0)


@lru_cache(maxsize=64)
def sample_lengths(
    prompts: int, isl: int, osl: int, shares: tuple[float, float] = INFERENCEMAX_RANGE
) -> tuple[tuple[int, int], ...]:
    """Tokens of each prompt and of its answer."""
    generator = np.random.RandomState(SEED)
    columns = []
    for length in (isl, osl):
        low, high = (int(length * share) for share in shares)
        columns.append(generator.randint(max(low, 1), high + 1, size=prompts).tolist())
    return tuple(zip(*columns, strict=True))
