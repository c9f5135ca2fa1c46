"""Tests of the whole method on a CPU in a short form: calibrate, plan, serve and judge."""

from __future__ import annotations

import csv
import json
import os
import shutil
import subprocess
import sys
import tarfile

import pytest
from typer.testing import CliRunner

from simkv.cli import app
from simkv.core.errors import InputError
from simkv.costs.cost_profile import load_profile
from simkv.gpu import timer
from simkv.gpu.campaign import count_stalled, read_samples
from simkv.gpu.scenario_execution import ScenarioExecution
from simkv.gpu.torch_executor import WallClock
from simkv.validation.gpu_runs.comparison_levels import validate_run
from simkv.validation.gpu_runs.timed_replay import read_runs
from simkv.validation.gpu_runs.validation_plan_file import profile_hash
from tests.conftest import ROOT
from tests.gpu.test_scenario_execution import SETUP, check_l0
from tests.laws.pressure_scenarios import plain_scenario


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """Return the output of `loop.sh` with a single trial of the tiny model."""
    path = tmp_path_factory.mktemp("loop") / "out"
    given = {"PYTHON": sys.executable, "MODEL": "tiny", "TIMES": "3", "SERVE": "110s"}
    done = subprocess.run(
        ["bash", str(ROOT / "calibrate/loop.sh"), str(path)],
        env={**os.environ, **given, "CASES": "burst-seed0"},
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return path


@pytest.fixture
def cpu_time():
    timer.use_clock("cpu")
    yield
    timer.use_clock("wall")


def test_files_of_the_campaign(out):
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


def test_profile_can_be_used(out):
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
    assert found["trials"].keys() == {"burst-seed0"}
    verdict = found["trials"]["burst-seed0"]["verdict"]
    assert verdict["step"] is None
    assert verdict["decisions"] > 50
    assert {"constant step", "tokens only", "five prices"} <= found["models"]["profile"].keys()
    assert "| same |" in (out / "validation.md").read_text()


@pytest.mark.parametrize(
    ("name", "names"),
    [("cpu-example", ["profile"]), ("h100-llama-3-8b", ["profile-overlapped", "profile"])],
)
def test_committed_campaign_is_complete(name, names):
    """Its samples and profiles have the current format, and its plan belongs to its profiles."""
    example = ROOT / "calibrate" / name
    assert sum(path.stat().st_size for path in example.rglob("*")) < 5 << 20
    samples = read_samples(example / "samples.csv")
    assert len(samples) > 90
    found = json.loads((example / "validation.json").read_text())["trials"]
    with tarfile.open(example / "runs.tar.gz") as runs:
        served = {member.name.split("/")[1] for member in runs.getmembers() if "/" in member.name}
    assert served >= {f"{trial}-1" for trial in found}
    plan = json.loads((example / "plan" / "plan.json").read_text())
    planned = [trial["name"] for trial in plan["trials"]]
    assert list(found) == planned[: len(found)]  # there may have been no time for the last runs
    assert len(found) >= 7
    profiles = {one: load_profile(f"{one}.json", example) for one in names}
    assert plan["profiles"] == {one: profile_hash(found) for one, found in profiles.items()}
    assert all(trial["verdict"]["step"] is None for trial in found.values())


@pytest.mark.parametrize(
    ("folder", "file"),
    [("cpu-example", "profile.json"), ("h100-llama-3-8b", "profile-overlapped.json")],
)
def test_committed_report_follows_from_the_committed_runs(folder, file, tmp_path):
    """If a trial is judged again without being served, the step errors and intervals are the
    same.
    """
    example, name = ROOT / "calibrate" / folder, "rows-quarter-seed0"
    with tarfile.open(example / "runs.tar.gz") as runs:
        members = [m for m in runs.getmembers() if f"/{name}-" in m.name]
        runs.extractall(tmp_path, members=members)
    again = [read_runs(path)["run"] for path in sorted((tmp_path / "runs").iterdir())]
    assert again
    profile = load_profile(file, example)
    found = validate_run(again[0], profile, again[1:])
    stored = json.loads((example / "validation.json").read_text())["trials"][name]
    for kind, error in found.steps["profile"].items():
        assert error.model_dump() == pytest.approx(stored["steps"]["profile"][kind], rel=1e-9)
        for figure, ends in found.step_ends["profile"][kind].items():
            expected = stored["step_ends"]["profile"][kind][figure]
            assert list(ends) == pytest.approx(expected, rel=1e-9)


def test_packaged_profiles_are_those_of_the_campaign():
    example = ROOT / "calibrate" / "h100-llama-3-8b"
    for file, name in (("profile-overlapped", ""), ("profile", "-sync")):
        measured = load_profile(f"{file}.json", example)
        packaged = load_profile(f"h100-llama-3-8b{name}")
        assert measured.model_copy(update={"name": packaged.name}) == packaged


def test_evaluates_recorded_runs_without_a_device(tmp_path):
    """Runs that were served are judged, and missing runs are named."""
    example = ROOT / "calibrate" / "h100-llama-3-8b"
    shutil.copytree(example / "plan", tmp_path / "plan")
    arguments = ["gpu", "validate", str(tmp_path), "--evaluate-only", "--repeats", "1"]
    arguments += ["--case", "poisson-seed1", "--case", "rows-half-sync-seed1"]
    with pytest.raises(InputError, match="contains no runs of this plan"):
        CliRunner().invoke(app, arguments, catch_exceptions=False)
    with tarfile.open(example / "runs.tar.gz") as runs:
        members = [m for m in runs.getmembers() if m.name.startswith("runs/poisson-seed1")]
        runs.extractall(tmp_path, members=members)
    done = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert done.exit_code == 0
    assert "Not served because time ran out: rows-half-sync-seed1-1." in done.output
    stored = json.loads((example / "validation.json").read_text())["trials"]["poisson-seed1"]
    found = json.loads((tmp_path / "validation.json").read_text())["trials"]["poisson-seed1"]
    assert found["verdict"] == stored["verdict"]
    assert found["intervals"] == pytest.approx(stored["intervals"])


def test_campaign_with_other_settings_is_not_continued(out):
    arguments = ["gpu", "calibrate", str(out), "--device", "cpu", "--model", "tiny", "--small"]
    with pytest.raises(InputError, match="clock cpu, but clock is now wall"):
        CliRunner().invoke(app, arguments, catch_exceptions=False)
    arguments += ["--clock", "cpu", "--kv-tokens", "4096"]
    try:
        with pytest.raises(InputError, match="but limits is now"):
            CliRunner().invoke(app, arguments, catch_exceptions=False)
        for option, message in (
            ("sun", "expected wall or cpu"),
            ("cpu", "requires a single thread"),
        ):
            options = [*arguments, "--clock", option, "--threads", "2"]
            with pytest.raises(InputError, match=message):
                CliRunner().invoke(app, options, catch_exceptions=False)
    finally:
        timer.use_clock("wall")


def test_cpu_time_jumps_over_waits(cpu_time):
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
