"""Tests that the examples show the effects that they describe."""

from __future__ import annotations

from simkv.metrics.scenario_runner import run_file
from tests.conftest import ROOT


def test_stale_signals_cause_herding() -> None:
    results = run_file(
        ROOT / "examples" / "fleet-herding.yaml", ["workload.arrivals.num_prompts=1000"]
    )
    ttft = {name: result.summary["ttft_ms"]["mean"] for name, result in results.items()}
    assert ttft["old"] > 10 * ttft["fresh"]
    assert ttft["old-power-of-two"] < 2 * ttft["fresh"]
    assert ttft["old-counting-own"] < 2 * ttft["fresh"]


def test_failure_overloads_other_replicas() -> None:
    results = run_file(ROOT / "examples" / "fleet-failure.yaml")
    preempted = {name: result.summary["preemptions"] for name, result in results.items()}
    assert preempted["one-fails"] > 4 * preempted["healthy"]
    assert preempted["five-replicas-one-fails"] < preempted["healthy"]
    assert results["one-fails"].summary["finished"] == 1200
