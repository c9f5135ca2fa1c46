"""The examples show what they say."""

from __future__ import annotations

from simkv.metrics.scenario_runner import run_file
from tests.conftest import ROOT


def test_old_signals_herd_and_two_choices_do_not() -> None:
    results = run_file(
        ROOT / "examples" / "fleet-herding.yaml", ["workload.arrivals.num_prompts=1000"]
    )
    ttft = {name: result.summary["ttft_ms"]["mean"] for name, result in results.items()}
    assert ttft["old"] > 10 * ttft["fresh"]
    assert ttft["old-power-of-two"] < 2 * ttft["fresh"]
    assert ttft["old-counting-own"] < 2 * ttft["fresh"]


def test_a_failure_pushes_the_others_over_the_edge() -> None:
    results = run_file(ROOT / "examples" / "fleet-failure.yaml")
    preempted = {name: result.summary["preemptions"] for name, result in results.items()}
    assert preempted["one-fails"] > 4 * preempted["healthy"]
    assert preempted["five-replicas-one-fails"] < preempted["healthy"]
    assert results["one-fails"].summary["finished"] == 1200
