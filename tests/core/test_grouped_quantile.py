"""Tests of quantiles of values with counts, compared with numpy's quantiles of the repeated
values.
"""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simkv.core.grouped_quantile import quantile


@given(
    counts=st.dictionaries(st.integers(0, 50), st.integers(1, 9), min_size=1, max_size=12),
    share=st.floats(0.0, 1.0),
)
def test_quantiles_match_numpy(counts: dict[int, int], share: float) -> None:
    values = sorted(counts)
    written_out = np.repeat(values, [counts[value] for value in values])
    found = quantile(values, list(accumulate(counts[value] for value in values)), share)
    assert found == pytest.approx(np.quantile(written_out, share), abs=1e-9)


def test_median_of_1_1_4() -> None:
    assert quantile([1.0, 4.0], [2, 3], 0.5) == 1.0
