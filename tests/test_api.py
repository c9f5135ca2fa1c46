"""Tests of the Python API."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import simkv
from simkv.core.errors import InputError
from simkv.scenario.scenario_loader import load
from simkv.study.run_digest import hash_code

REPORT = "vllm-37307-partial-admission"


@pytest.fixture(autouse=True)
def _code_of_now() -> None:
    """Hash simkv's code again, in case it was edited during the test session."""
    hash_code.cache_clear()


def test_import_is_light() -> None:
    code = (
        "import sys, simkv\n"
        "assert not {'numpy', 'pandas', 'pydantic', 'simpy'} & set(sys.modules)\n"
        "assert callable(simkv.run)\n"
        "from simkv.metrics.scenario_runner import run_scenario\n"
        f"print(simkv.run({REPORT!r}).figures.loc['preemptions', 'after'])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "0\n"


def test_run_returns_frames() -> None:
    outcome = simkv.run(REPORT)
    assert list(outcome.figures.columns) == list(outcome.results) == ["before", "after"]
    summary = outcome.results["before"].summary
    assert outcome.figures.loc["e2e_ms.p99", "before"] == summary["e2e_ms"]["p99"]
    assert len(outcome.requests) == 4
    assert outcome.requests["preemptions"].sum() == summary["preemptions"]
    assert outcome.ledger["end_s"].max() >= outcome.requests["finish_s"].max()
    assert len(outcome.preemptions) == outcome.figures.loc["preemptions"].sum()
    assert len(outcome.steps) == sum(r.summary["steps"] for r in outcome.results.values())


def test_overrides_by_path() -> None:
    one = simkv.run(REPORT, engine__num_gpu_blocks=1100)
    other = simkv.run(REPORT, **{"engine.num_gpu_blocks": 1100})
    assert one.figures.equals(other.figures)
    assert not one.figures.equals(simkv.run(REPORT).figures)
    with pytest.raises(InputError, match="did you mean 'num_gpu_blocks'"):
        simkv.run(REPORT, engine__num_gpu_block=1100)


def test_accepts_mapping_and_loaded_scenario() -> None:
    contents = {
        "name": "two",
        "workload": {"burst": {"num_prompts": 2, "prompt_tokens": 100, "output_tokens": 10}},
        "engine": {"name": "vllm", "num_gpu_blocks": 128, "max_model_len": 1000},
        "profile": "unit-step",
    }
    kept = str(contents)
    outcome = simkv.run(contents, workload__burst__num_prompts=3)
    assert outcome.figures.loc["finished", "run"] == 3
    assert str(contents) == kept
    loaded = outcome.results["run"].scenario
    assert simkv.run(loaded).figures.equals(outcome.figures)
    assert simkv.run(loaded, timeout=1.5).figures.loc["timed_out", "run"] == 3


def test_packaged_scenarios_round_trip_through_fields(root: Path) -> None:
    for path in sorted((root / "scenarios").glob("vllm-*.yaml"))[:3]:
        for scenario in load(path).values():
            profile = str(path.parent / scenario.profile)
            local = scenario.model_copy(
                update={"profile": profile if profile.endswith(".json") else scenario.profile}
            )
            again = simkv.run(local).results["run"].scenario
            assert (again.workload, again.engine) == (scenario.workload, scenario.engine)


def test_compare() -> None:
    frame = simkv.compare(REPORT)
    assert list(frame.columns) == ["before", "after"]
    both = simkv.compare(REPORT, "vllm-31731-heavy-head", REPORT)
    assert list(both.columns.get_level_values("scenario").unique()) == [
        REPORT,
        "vllm-31731-heavy-head",
        f"{REPORT} (2)",
    ]
    assert both[REPORT].equals(frame)


def test_sweep_is_independent_of_workers(tmp_path: Path) -> None:
    over = {"engine.num_gpu_blocks": "700..1100:100", "variants": ["after", "before"]}
    seen: list[tuple[int, int]] = []
    here = simkv.sweep(REPORT, over, jobs=1, advance=lambda *done: seen.append(done))
    there = simkv.sweep(REPORT, over, jobs=2, store=tmp_path / "points.jsonl")
    assert here.equals(there)
    assert here["variant"].tolist()[:2] == ["after", "before"]
    assert seen[-1] == (10, 10)


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        ({"survive": 2}, "--survive 2: expected 0 to 1"),
        ({"repeats": 0}, "--repeats 0: expected a number of 1 or more"),
        ({"profile_error": 2}, "--profile-error 2: expected 0 to 0.9"),
        ({"gpus_per_replica": 0}, "--gpus-per-replica 0: expected a number of 1 or more"),
        ({"neighbours": -1}, "--neighbours -1: expected a number of 0 or more"),
    ],
)
def test_plan_rejects_same_values_as_command(wrong: dict[str, Any], what: str) -> None:
    knob = "engine.num_gpu_blocks=700..1100:200"
    with pytest.raises(InputError, match=what):
        simkv.plan(REPORT, smallest=knob, objectives="preemptions<=5", jobs=1, **wrong)


def test_accepts_single_objective_and_value() -> None:
    found = simkv.plan(
        REPORT,
        smallest="engine.num_gpu_blocks=1100,1200",
        objectives="preemptions<=5",
        variants=["after"],
        cliff=False,
        jobs=1,
    )
    assert found.answer == {"after": 1100}
    table = simkv.sweep(REPORT, {"engine.num_gpu_blocks": 1100}, jobs=1)
    assert table["engine.num_gpu_blocks"].tolist() == [1100, 1100]


def test_plot_and_pareto(tmp_path: Path) -> None:
    table = simkv.sweep(REPORT, {"engine.num_gpu_blocks": "700..1100:100"}, jobs=1)
    drawn = simkv.plot(table, "e2e_ms.mean", "engine.num_gpu_blocks", tmp_path / "new")
    assert drawn.read_bytes().startswith(b"\x89PNG")
    goals = "output_throughput:max,preemptions:min"
    front = simkv.pareto(table, goals)
    assert front.equals(simkv.pareto(table, goals, tmp_path))
    assert len(list(tmp_path.glob("pareto-*.png"))) == 1
    best = table["output_throughput"].max()
    assert front["output_throughput"].max() == best
    assert 0 < len(front) < len(table)
    for wrong in ("fleet.imbalance", "steeps"):
        with pytest.raises(InputError):
            simkv.plot(table, wrong, "engine.num_gpu_blocks", tmp_path)


def test_example_runs(root: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(root / "examples" / "sweep.py")],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    cliff = int(done.stdout.split("The old rule needs ")[1].split()[0])
    # Two requests of at most 8,000 + 200 tokens each, and the null block.
    assert 801 < cliff <= 2 * 513 + 1


def test_plan_signature_matches_command() -> None:
    keywords = inspect.signature(simkv.plan).parameters
    assert {"smallest", "objectives", "held_back", "cliff", "store", "advance"} <= keywords.keys()
    assert (keywords["neighbours"].default, keywords["cliff"].default) == (2, None)
    with pytest.raises(TypeError, match="unexpected keyword argument 'smalest'"):
        simkv.plan(REPORT, smalest="timeout=1..3")


# Output at a Python prompt and in a notebook


def test_outcome_repr_has_line_per_variant() -> None:
    outcome = simkv.run("mistralrs-six")
    lines = repr(outcome).splitlines()
    assert lines[0] == "Outcome of mistralrs-six"
    assert len(lines) == 1 + len(outcome.results)
    for line, (name, result) in zip(lines[1:], outcome.results.items(), strict=True):
        assert line.startswith(f"  {name}: {result.summary['verdict']}, 6 of 6 finished in ")
    assert len(repr(outcome.results)) < 500
    html = outcome._repr_html_()
    assert html.count("<tr") < 25
    for name in (*outcome.results, "ttft_ms.p99", "starved"):
        assert f"<th>{name}</th>" in html


def test_plans_repr_is_one_line() -> None:
    plans = simkv.plan(
        "mistralrs-six",
        smallest="engine.num_gpu_blocks=401,420",
        objectives=["unserved<=0"],
        jobs=1,
    )
    assert repr(plans).startswith("Plans(before: engine.num_gpu_blocks = ")
    assert repr(plans).count("\n") == 0
    assert "&lt;=" in plans._repr_html_()
    assert len(plans.plans) > 1
    assert str(plans).count("Step times: ") == 1
