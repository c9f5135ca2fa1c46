"""Tests of the calibration with published results at other concurrencies."""

from __future__ import annotations

from pathlib import Path

import pytest

from dev.left_out_rates import SWEEPS, _errors, read_cases
from simkv.validation.serving_points.measured_rows import read_rows


def test_each_server_has_three_published_results(shared: Path) -> None:
    rows = read_rows(shared / "silicon" / "public.csv")
    for sweep in SWEEPS:
        cases = read_cases(sweep, rows)
        assert [str(case.benchmark.path) for case in cases] == [
            f"c{clients}" for clients in sweep.concurrencies
        ]
        assert {case.scenario.engine.name for case in cases} == {sweep.backend}  # type: ignore[union-attr]


def test_throughput_follows_from_the_mean_latency(shared: Path) -> None:
    case = read_cases(SWEEPS[0], read_rows(shared / "silicon" / "public.csv"))[0]
    slower = {"ttft_ms.mean": 0.25, "tpot_ms.mean": 0.25}
    assert _errors(case.benchmark, slower)[2] == pytest.approx(1 / 1.25 - 1)
