"""Tests of descriptions of differences between variants, and of the selection of fixes."""

from __future__ import annotations

from pathlib import Path

import pytest

from simkv.metrics.run_result import RunResult
from simkv.metrics.scenario_runner import run_file
from simkv.report import narrative
from simkv.report.narrative import describe_fix, find_better_variant, select_variant
from simkv.report.page_text import badge
from tests.conftest import ROOT

OVERLOAD = """\
name: t
workload: {burst: {num_prompts: 12, prompt_tokens: 30, output_tokens: 20, interval: 1.0}}
engine: {name: vllm, block_size: 4, num_gpu_blocks: 32, max_num_seqs: 1, startup_check: false}
profile: unit-step
timeout: 40.0
variants:
  before: {}
"""


def run(folder: Path, other: str) -> dict[str, RunResult]:
    (folder / "s.yaml").write_text(f"{OVERLOAD}  other: {other}\n")
    results = run_file(folder / "s.yaml")
    assert select_variant(results) == "before"
    assert results["other"].summary["finished"] > results["before"].summary["finished"]
    return results


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ("{fleet: {replicas: 12}}", "It changes fleet.replicas: none → 12."),
        ("{fleet: {replicas: 8, router: random}}", "fleet.router.name: none → random"),
        ("{engine: {max_num_seqs: 12}}", "It changes engine.max_num_seqs: 1 → 12."),
    ],
)
def test_describes_the_changes_of_a_fix(tmp_path: Path, other: str, said: str) -> None:
    results = run(tmp_path, other)
    assert find_better_variant(results, "before") == "other"
    assert said in " ".join(describe_fix(results, "before", "other"))


def test_one_against_four_replicas(tmp_path: Path) -> None:
    text = OVERLOAD.replace("before: {}", "before: {fleet: {replicas: 1}}")
    (tmp_path / "s.yaml").write_text(f"{text}  other: {{fleet: {{replicas: 4}}}}\n")
    results = run_file(tmp_path / "s.yaml")
    assert "It changes fleet.replicas: 1 → 4." in describe_fix(results, "before", "other")


@pytest.mark.parametrize(
    "other",
    [
        "{workload: {burst: {num_prompts: 2}, max_concurrency: 2}, timeout: 1000}",
        "{workload: {burst: {interval: 1.5}}, engine: {max_num_seqs: 12}}",
        "{step_scale: {decode: 0.05}}",
        "{timeout: 1000}",
    ],
)
def test_variant_with_other_workload_is_not_a_fix(tmp_path: Path, other: str) -> None:
    (tmp_path / "s.yaml").write_text(f"{OVERLOAD}  other: {other}\n")
    results = run_file(tmp_path / "s.yaml")
    share = {n: r.summary["finished"] / r.summary["requests"] for n, r in results.items()}
    assert share["other"] > share["before"]
    assert find_better_variant(results, "before") is None
    assert len(describe_fix(results, "before", None)) == 1


def test_served_run_with_a_verdict_names_it() -> None:
    results = run_file(ROOT / "scenarios/mistralrs-forty.yaml")
    assert {name: narrative.describe_ending(result) for name, result in results.items()} == {
        "before-assumed": "starved",
        "before-fitted": "served, thrash",
        "after": "served",
        "after-assumed": "served",
    }
    tones = [badge(result)["tone"] for result in results.values()]
    assert tones == ["bad", "warn", "good", "good"]


def test_main_victim_differs_before_and_after_2033() -> None:
    results = run_file(ROOT / "scenarios/mistralrs-2033-newest-first.yaml")
    assert (
        narrative.describe_main_victim(results["before"].diagnosis)
        == "Request 0 lost its KV to request 1."
    )
    assert (
        narrative.describe_main_victim(results["after"].diagnosis)
        == "Request 1 lost its KV to request 0."
    )
