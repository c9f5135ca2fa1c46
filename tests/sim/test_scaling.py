"""Tests that the work per request does not grow with the number of waiting requests.

``benchmarks/scaling.py`` tests all sizes and variants.
"""

from __future__ import annotations

import pytest

from benchmarks.scaling import AXES, exponent, work


@pytest.mark.parametrize(
    ("engine", "variant"),
    [("vllm", "0.33.0-skip-blocked"), ("sglang", "0.5.23"), ("mistralrs", "merged2250")],
)
def test_waiting_requests_cost_nothing(engine: str, variant: str) -> None:
    sized, _, _ = AXES["waiting"]
    assert exponent(sized, engine, variant, 25, 100) < 0.1


def test_counts_executed_lines() -> None:
    def rounds(count: int) -> int:
        return work(lambda: [None for _ in range(count)])

    assert rounds(2000) - rounds(1000) == 1000
