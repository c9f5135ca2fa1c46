"""Tests of explanations of runs, verdicts in ``summary.json``, and exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from simkv.cli import app
from simkv.core.errors import InputError
from simkv.metrics.run_result import RunResult
from simkv.metrics.scenario_runner import run_file
from simkv.report.run_explanation import (
    MAX_TIMELINE_LINES,
    WIDTH,
    explain_request,
    explain_run,
)

TWO = """
name: two
workload:
  requests:
    - {prompt_tokens: 8, output_tokens: 4}
    - {prompt_tokens: 12, output_tokens: 1, arrival: 0.5, timeout: 3}
    - {prompt_tokens: 4, output_tokens: 1, arrival: 0.5}
engine: {name: vllm, block_size: 4, num_gpu_blocks: 6, enable_prefix_caching: false,
         async_scheduling: false, max_model_len: 16}
profile: unit-step
variants:
  tight: {}
  wide: {engine: {num_gpu_blocks: 64}}
"""
THRASHING = """
name: thrashing
workload: {burst: {num_prompts: 6, prompt_tokens: 50, output_tokens: 40, interval: 1.5}}
engine: {name: mistralrs, variant: bucketed}
profile: unit-step
"""


@pytest.fixture
def two(tmp_path: Path) -> Path:
    path = tmp_path / "two.yaml"
    path.write_text(TWO, encoding="utf-8")
    return path


def explain(*arguments: object) -> str:
    done = CliRunner().invoke(app, ["explain", *map(str, arguments)])
    if done.exception:
        raise done.exception
    assert all(len(line) <= WIDTH + 60 for line in done.output.splitlines())
    return done.output


def test_explains_all_variants_briefly(two: Path) -> None:
    told = explain(two)
    assert "tight (vllm 0.33.0): starved, 2 of 3 finished, 1 starved" in told
    assert "starvation: one request starved; request 1 waited 3.000 s of its 3.000 s" in told
    assert "wide (vllm 0.33.0): served, 3 of 3 finished" in told
    assert f"simkv explain {two} --variant tight" in told


def test_explains_one_variant(two: Path) -> None:
    told = explain(two, "--variant", "tight").splitlines()
    (line,) = [line for line in told if line.startswith("  waiting for KV blocks")]
    assert line.split() == ["waiting", "for", "KV", "blocks", "2.50", "s", "21.7", "%", "█" * 25]
    assert told[-1] == f"Explain one request: simkv explain {two} --variant tight 1"
    assert len(told) < 30


def test_explains_one_request(two: Path) -> None:
    told = explain(two, 2, "--variant", "tight").splitlines()
    assert told[0].startswith("Request 2 in tight: finished after 4.50 s")
    life = told[told.index("") + 1 :]
    assert life[:4] == [
        "     0.500 s     0.50 s  not yet seen by scheduler",
        "     1.000 s        3 s  behind the head of the queue: request 1, waiting for KV blocks, "
        "3 s",
        "     4.000 s        1 s  prefill: 4 tokens",
        "     5.000 s  finished after 4.50 s",
    ]
    assert told[-3] == "Main blockers: request 0 (3 s)."
    assert told[-1] == "  then open runs/two.html#t=1&request=2"


def test_results_directory_is_simulated_again(two: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    CliRunner().invoke(app, ["run", str(two), "--out", str(out), "--no-plots"])
    told = explain(out)
    assert told.splitlines()[0] == f"Simulated again from {out / 'scenario.yaml'}."
    assert told.splitlines()[2:-2] == explain(two).splitlines()[:-2]


def thrashing(folder: Path) -> RunResult:
    path = folder / "thrashing.yaml"
    path.write_text(THRASHING, encoding="utf-8")
    return run_file(path)["run"]


def test_long_timeline_is_shortened(tmp_path: Path) -> None:
    result = thrashing(tmp_path)
    worst = max(result.diagnosis.ledger, key=lambda i: len(result.diagnosis.ledger[i]))
    tiles = result.diagnosis.ledger[worst]
    assert len(tiles) > 3 * MAX_TIMELINE_LINES
    told = list(explain_request("run", result, worst))
    assert len(told) < 50
    (left_out,) = [line for line in told if " intervals: " in line]
    assert f"{len(tiles) - 20} intervals: " in left_out


def test_preemptions_by_reason(tmp_path: Path) -> None:
    result = thrashing(tmp_path)
    told = " ".join(explain_run("run", result, "simkv explain x {}".format))
    count = len(result.diagnosis.preemptions)
    assert f"Preempted {count} times because sequences of another length were running." in told
    assert "for recomputed tokens" in told


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((7,), "request 7: there is no such request; expected an id from 0 to 2"),
        (
            ("--variant", "tigth"),
            "--variant tigth: the scenario has no such variant (did you mean 'tight'?); expected",
        ),
    ],
)
def test_rejects_unknown_requests_and_variants(
    two: Path, arguments: tuple[object, ...], message: str
) -> None:
    with pytest.raises(InputError) as raised:
        explain(two, *arguments)
    assert str(raised.value).startswith(message)


# Verdicts in summary.json, and the exit code.


def invoke(path: Path, *arguments: str) -> int:
    command = ["run", str(path), "--no-plots", "--out", str(path.parent / "out"), *arguments]
    return CliRunner().invoke(app, command).exit_code


def test_summary_contains_the_verdicts(two: Path) -> None:
    assert invoke(two) == 3
    variants = json.loads((two.parent / "out" / "summary.json").read_text())["variants"]
    (verdict, *_) = variants["tight"]["verdicts"]
    assert verdict["verdict"] == "starvation"
    assert verdict["requests"] == [1, 0]
    assert verdict["kinds"] == {"unseen": 0.5, "blocks": 2.5}
    assert verdict["behind"] == [{"id": 0, "seconds": 2.5, "block_seconds": 7.5}]
    assert variants["tight"]["verdict"] == "starved"
    assert variants["wide"]["verdicts"] == []


def test_exit_code_depends_on_the_outcome(two: Path) -> None:
    served = two.with_name("served.yaml")
    served.write_text(TWO.replace(", timeout: 3", ""), encoding="utf-8")
    assert invoke(served) == 0
    assert invoke(two) == 3
    assert invoke(two, "--exit-zero") == 0
    cut_off = two.with_name("cut-off.yaml")
    cut_off.write_text(TWO.replace(", timeout: 3", "") + "horizon: 2\n", encoding="utf-8")
    assert invoke(cut_off) == 0


def test_expectations_decide_the_exit_code(two: Path) -> None:
    expected = two.with_name("expected.yaml")
    expected.write_text(TWO + "expect: {tight: {verdict: starved}}\n", encoding="utf-8")
    assert invoke(expected) == 0
    expected.write_text(TWO + "expect: {tight: {verdict: served}}\n", encoding="utf-8")
    assert invoke(expected) == 1
    assert invoke(expected, "--exit-zero") == 0
