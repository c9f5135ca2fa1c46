"""The whole loop on a CPU, in a short form: measured, fitted, predicted, served, judged."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
import tarfile

import pytest
from simkv.gpu.drift_correction import count_stalled
from typer.testing import CliRunner

from simkv.cli import app
from simkv.core.errors import InputError
from simkv.costs.cost_profile import load_profile
from simkv.gpu import timer
from simkv.gpu.campaign import read_samples
from simkv.gpu.scenario_execution import ScenarioExecution
from simkv.gpu.torch_executor import WallClock
from simkv.validation.gpu_runs.comparison_levels import validate_run
from simkv.validation.gpu_runs.timed_replay import read_runs
from tests.conftest import ROOT
from tests.gpu.test_scenario_execution import SETUP, check_l0
from tests.laws.pressure_scenarios import plain_scenario


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """One case of the tiny model, served once."""
    path = tmp_path_factory.mktemp("loop") / "out"
    given = {"PYTHON": sys.executable, "MODEL": "tiny", "TIMES": "3", "REPEATS": "1"}
    done = subprocess.run(
        ["bash", str(ROOT / "calibrate/loop.sh"), str(path)],
        env={**os.environ, **given, "CASES": "prefill-heavy"},
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return path


@pytest.fixture
def cpu_time():
    timer.use_clock("cpu")
    yield
    timer.use_clock("wall")


def test_it_leaves_what_was_measured(out):
    assert {path.name for path in out.iterdir()} == {
        "campaign.json", "clocks.csv", "passes.csv", "profile.json", "samples.csv",
        "validation", "validation.json", "validation.md", "steps.png", "figures.png",
    }  # fmt: skip
    assert json.loads((out / "campaign.json").read_text())["clock"] == "cpu"
    samples = read_samples(out / "samples.csv")
    assert {s.part for s in samples} >= {"rest", "decode", "mixed decode", "prefill", "step"}
    assert all(0 < s.p10_s <= s.median_s <= s.p90_s <= s.most_s for s in samples)
    assert 0 <= count_stalled(samples) < len(samples)
    with (out / "passes.csv").open() as file:
        runs = {row["variant"] for row in csv.DictReader(file)}
    assert runs == {"fitted", "few-and-long", "many-and-short"}


def test_the_profile_says_what_it_is(out):
    profile = load_profile("profile.json", out)
    assert (profile.basis, profile.model) == ("measured", "tiny")
    assert profile.fit.held_out["all"].points > 20
    assert {"all but attention, decodes", "prefill attention, prefill_pairs"} <= {
        term.name for term in profile.terms
    }
    scenario = out.parent / "short.yaml"
    scenario.write_text(
        "name: short\nprofile: out/profile.json\n"
        "workload: {burst: {num_prompts: 4, prompt_tokens: 30, output_tokens: 5}}\n"
        "engine: {name: vllm, num_gpu_blocks: 50, max_model_len: 100}\n"
    )
    run = CliRunner().invoke(
        app, ["run", str(scenario), "--out", str(out.parent / "run"), "--no-plots"]
    )
    assert run.exit_code == 0, run.output
    summary = json.loads((out.parent / "run" / "summary.json").read_text())
    assert next(iter(summary["variants"].values()))["finished"] == 4


def test_decisions_are_the_same(out):
    found = json.loads((out / "validation.json").read_text())
    assert found["cases"].keys() == {"prefill-heavy"}
    verdict = found["cases"]["prefill-heavy"]["verdict"]
    assert verdict["step"] is None
    assert verdict["decisions"] > 50
    assert "| same |" in (out / "validation.md").read_text()


def test_the_campaign_that_is_shown_is_whole():
    """Its samples and profile are of this version's form, its plan is that of its profile."""
    example = ROOT / "calibrate" / "cpu-example"
    assert sum(path.stat().st_size for path in example.rglob("*")) < 2 << 20
    samples = read_samples(example / "samples.csv")
    assert len(samples) > 250
    profile = load_profile("profile.json", example)
    plan = json.loads((example / "plan" / "plan.json").read_text())
    found = json.loads((example / "validation.json").read_text())["cases"]
    assert [case["name"] for case in plan["cases"]] == list(found)
    assert plan["profile"] == profile.name
    assert all(case["verdict"]["step"] is None for case in found.values())
    assert all(len(case["stalls"]) == 3 for case in found.values())  # three runs of each


def test_the_page_that_is_shown_is_of_the_runs_that_are_kept(tmp_path):
    """One case of it, judged again without serving: the errors of steps and their ends."""
    example = ROOT / "calibrate" / "cpu-example"
    with tarfile.open(example / "runs.tar.gz") as runs:
        kept = [m for m in runs.getmembers() if "mistralrs-six-pr2034-" in m.name]
        runs.extractall(tmp_path, members=kept)
    again = [read_runs(path)["run"] for path in sorted((tmp_path / "runs").iterdir())]
    profile = load_profile("profile.json", example)
    found = validate_run(again[0], profile, again[1:])
    told = json.loads((example / "validation.json").read_text())["cases"]["mistralrs-six-pr2034"]
    assert len(again) == 3
    for kind, error in found.steps["profile"].items():
        assert error.model_dump() == pytest.approx(told["steps"]["profile"][kind], rel=1e-9)
        for name, ends in found.step_ends["profile"][kind].items():
            assert list(ends) == pytest.approx(told["step_ends"]["profile"][kind][name], rel=1e-9)


def test_a_campaign_of_something_else_is_not_gone_on_with(out):
    arguments = ["gpu", "calibrate", str(out), "--device", "cpu", "--model", "tiny", "--small"]
    with pytest.raises(InputError, match="clock was cpu, now wall"):
        CliRunner().invoke(app, arguments, catch_exceptions=False)
    arguments += ["--clock", "cpu", "--kv-tokens", "4096"]
    try:
        with pytest.raises(InputError, match="limits was"):
            CliRunner().invoke(app, arguments, catch_exceptions=False)
        for option, message in (("sun", "expected wall or cpu"), ("cpu", "is that of one thread")):
            options = [*arguments, "--clock", option, "--threads", "2"]
            with pytest.raises(InputError, match=message):
                CliRunner().invoke(app, options, catch_exceptions=False)
    finally:
        timer.use_clock("wall")


def test_in_cpu_time_nobody_waits(cpu_time):
    clock = WallClock()
    clock.process(_after(clock, 1e6))
    clock.run()
    assert clock.now == 1e6
    assert clock.wall() >= 1e6
    run = ScenarioExecution(plain_scenario("vllm", "0.33.0"), SETUP).serve()
    check_l0(run)
    busy = sum(p.seconds for p in run.passes)
    assert 0 < busy < 60


def _after(clock, seconds):
    yield clock.timeout(seconds)
