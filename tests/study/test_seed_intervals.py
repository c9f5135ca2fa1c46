"""Tests of the intervals of metrics over seeds."""

from __future__ import annotations

import pytest

from simkv.study.seed_runs import SeedInterval


def test_interval_of_counts_is_not_negative() -> None:
    rare = SeedInterval.of([0.0, 0.0, 9.0])
    assert (rare.low, rare.least, rare.most) == (0.0, 0.0, 9.0)
    assert rare.high > 9
    usual = SeedInterval.of([10.0, 11.0, 12.0])
    assert usual.mean - usual.low == pytest.approx(usual.high - usual.mean)
