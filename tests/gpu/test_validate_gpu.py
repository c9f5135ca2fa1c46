"""Tests of `simkv gpu validate` from the profile to the page, on a CPU with the tiny model."""

from __future__ import annotations

import csv
import json
import shutil
import subprocess
import sys
import tarfile

import pytest
from typer.testing import CliRunner

from simkv.cli import app
from simkv.core.errors import InputError
from simkv.costs.cost_profile import CostProfile, StepError
from simkv.costs.hardware.model_shape import MODEL_SHAPES
from simkv.gpu.machine_info import machine_info
from simkv.validation.gpu_runs.baseline_models import roofline
from simkv.validation.gpu_runs.device_drift import drift_lines, note_sentinel, read_sentinels
from tests.gpu.test_gpu_machine_files import on_gpu

KEPT = ("rows-half-seed0", "memory-pressure-seed0", "rows-quarter-seed0")
#: Approximate costs of the tiny model on a CPU: 2 ms per step.
ROOFLINE = roofline(MODEL_SHAPES["tiny"], 4, 1e10, 1e11)
ERROR = StepError(points=9, median=0.1, p95=0.5, bias=0.0)
PROFILE = CostProfile.model_validate(
    {
        **ROOFLINE.model_dump(exclude_none=True),
        "name": "assumed",
        "gpu": machine_info("cpu")["device"],
        "terms": [
            *(term.model_dump(exclude_none=True) for term in ROOFLINE.terms),
            {"name": "host", "feature": "steps", "seconds": 2e-3},
        ],
        "range": {
            "decode_seqs": (1, 16),
            "decode_context": (1, 2048),
            "decode_tail": (1, 190),
            "prefill_tokens": (2, 256),
        },
        "fit": {"points": 9, "held_out": {"all": ERROR.model_dump()}},
    }
)
#: Description and measurements of a campaign, for the plan and the baselines.
CAMPAIGN = {"itemsize": 4, "ceilings": {"bytes_per_s": 1e10, "flops_per_s": 1e11}}
LOADS = "prefill_seqs,prefill_tokens,prefill_context,decode_seqs,decode_context,prefill_pairs"


def write_campaign(folder, profile=PROFILE):
    """Write a directory as `simkv gpu calibrate` does, with a few measurements."""
    folder.mkdir(parents=True)
    (folder / "profile.json").write_text(profile.model_dump_json(exclude_none=True))
    (folder / "campaign.json").write_text(json.dumps(CAMPAIGN))
    rows = [f"fitted,decode,0.00{n},9,0,0,0,{n},{9 * n},0" for n in range(1, 9)]
    rows += [f"fitted,prefill,0.00{n},0,1,{20 * n},0,0,0,{200 * n * n}" for n in range(1, 9)]
    header = f"variant,kind,seconds,longest_context,{LOADS}"
    (folder / "passes.csv").write_text("\n".join([header, *rows, ""]))
    (folder / "samples.csv").write_text(f"key,part,longest,median_s,{LOADS}\n")


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    """Return the output of ``--plan-only``, which needs no torch."""
    path = tmp_path_factory.mktemp("planned")
    write_campaign(path / "campaign")
    command = ["gpu", "validate", str(path / "out"), "--profile", str(path / "campaign")]
    command += ["--device", "cpu", "--budget", "110s", "--plan-only"]
    code = "import sys; sys.modules['torch'] = None; sys.argv[1:] = eval(sys.argv[1]);"
    code += "from simkv.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, repr(command)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Predicted duration: 1." in done.stdout
    assert {p.name for p in (path / "out").iterdir()} == {"plan"}
    return path / "out"


@pytest.fixture(scope="module")
def folder(planned, tmp_path_factory):
    """Return the folder of a validation with three trials, each served once."""
    path = tmp_path_factory.mktemp("validation")
    shutil.copytree(planned, path / "out")
    keep(path / "out/plan/plan.json", KEPT)
    run = invoke(path, "--budget", "30m", "--repeats", "1")
    assert run.exit_code == 0, run.output
    return path


def keep(path, names):
    """Remove all other trials from a plan."""
    plan = json.loads(path.read_text())
    assert len(plan["trials"]) == 16
    plan["trials"] = [trial for trial in plan["trials"] if trial["name"] in names]
    path.write_text(json.dumps(plan))


def invoke(path, *arguments):
    command = ["gpu", "validate", str(path / "out"), "--device", "cpu", *arguments]
    return CliRunner().invoke(app, command, catch_exceptions=False)


MODELS = {"profile", "constant step", "tokens only", "five prices", "random forest", "roofline"}


def test_all_three_levels(folder):
    found = json.loads((folder / "out" / "validation.json").read_text())
    assert found["skipped"] == []
    assert found["trials"].keys() == set(KEPT)
    for name, trial in found["trials"].items():
        assert trial["verdict"]["step"] is None, name
        assert trial["verdict"]["decisions"] > 5
        assert set(trial["steps"]) | {"random forest"} == MODELS
        assert {f["name"] for f in trial["figures"]} >= {"makespan_s", "ttft_ms.p99"}
        assert trial["intervals"]["figures"] > 5
        for model, kinds in trial["steps"].items():
            for kind, error in kinds.items():
                ends = trial["step_ends"][model][kind]
                assert bool(ends) is (error["points"] > 1), (name, model, kind)
                for figure, (low, high) in ends.items():
                    assert low <= error[figure] <= high, (name, model, kind, figure)
        assert len(trial["stalls"]) == 1
    assert found["models"]["profile"]["tokens only"]["trials"] == 3
    page = (folder / "out" / "validation.md").read_text()
    assert page.count("| same |") == len(KEPT)
    assert "median width" in page
    assert "no computed step times to compare with" in page
    for name in ("steps.png", "figures.png"):
        assert (folder / "out" / name).read_bytes().startswith(b"\x89PNG")


def test_runs_are_recorded(folder):
    rows = list(csv.DictReader((folder / "out/runs/memory-pressure-seed0-1/passes.csv").open()))
    assert sum(int(row["preempted"]) for row in rows) > 0
    summary = json.loads((folder / "out/runs/memory-pressure-seed0-1/summary.json").read_text())
    assert summary["ceilings"]["bytes_per_s"] > 0
    assert summary["variants"]["run"]["unbacked_tokens"] == 0


def test_device_is_monitored(folder):
    """A fixed step is timed before, between and after the runs, and the clock every second."""
    sentinels = read_sentinels(folder / "out")
    order = [t["name"] for t in json.loads((folder / "out/plan/plan.json").read_text())["trials"]]
    assert [s.before for s in sentinels] == [*(f"{name}-1" for name in order), "the end"]
    assert all(0 < s.seconds < 1 for s in sentinels)
    assert "Drift: a fixed step took" in (folder / "out/validation.md").read_text()
    rows = list(csv.DictReader((folder / "out/clocks.csv").open()))
    assert rows
    assert all(float(row["unix_s"]) > 1e9 and float(row["load"]) > 0 for row in rows)


def test_drift_of_the_device_is_reported(tmp_path):
    for before, seconds in (("a-1", 1.0), ("b-1", 1.01), ("c-1", 1.05), ("the end", 0.99)):
        note_sentinel(tmp_path, before, seconds)
    first, second = drift_lines(read_sentinels(tmp_path))
    assert "-1.0 to +5.0 %" in first
    assert second == "It changed by more than 2 % before: c-1."
    (tmp_path / "sentinels.csv").write_text("a,b\n1,2\n")
    with pytest.raises(InputError, match="not a file with reference steps"):
        read_sentinels(tmp_path)


def test_rejects_a_profile_of_another_device(folder, tmp_path):
    other = PROFILE.model_copy(update={"gpu": "NVIDIA H100 80GB HBM3"})
    shutil.copytree(folder / "out/plan", tmp_path / "out/plan")
    (tmp_path / "out/plan/profile.json").write_text(other.model_dump_json(exclude_none=True))
    with pytest.raises(InputError, match="was measured on NVIDIA H100 80GB HBM3, but this GPU is"):
        invoke(tmp_path, "--budget", "0.01s")
    run = invoke(tmp_path, "--budget", "0.01s", "--repeats", "1", "--allow-other-gpu")
    assert "Not served because time ran out" in run.output


def test_complete_runs_are_judged_without_a_device(folder, monkeypatch):
    before = (folder / "out/runs/rows-half-seed0-1/passes.csv").read_bytes()
    # another trial would need a GPU
    monkeypatch.setitem(sys.modules, "simkv.gpu.validation_plan_runner", None)
    run = invoke(folder, "--repeats", "1", "--device", "cuda")
    assert run.exit_code == 0, run.output
    assert (folder / "out/runs/rows-half-seed0-1/passes.csv").read_bytes() == before


def test_missing_runs_are_reported_if_no_time_is_left(folder):
    run = invoke(folder, "--budget", "0.01s", "--repeats", "2")
    assert run.exit_code == 0
    assert "Not served because time ran out: rows-quarter-seed0-2" in run.output
    assert not (folder / "out/runs/rows-quarter-seed0-2").exists()
    run = invoke(folder, "--repeats", "1", "--serve-only")
    assert "--evaluate-only" in run.output


def test_different_decision_is_an_error(folder):
    path = folder / "out/runs/rows-half-seed0-1/passes.csv"
    text = path.read_text()
    lines = text.splitlines()
    path.write_text("\n".join([*lines[:-4], ""]))  # without the last steps
    try:
        run = invoke(folder, "--repeats", "1")
    finally:
        path.write_text(text)
    assert run.exit_code == 1
    assert "differs at decision" in run.output


def test_rejects_bad_input(folder, tmp_path):
    with pytest.raises(InputError, match="expected 1 or more"):
        invoke(folder, "--repeats", "0")
    with pytest.raises(InputError, match="expected a time such as 90s"):
        invoke(folder, "--budget", "soon")
    with pytest.raises(InputError, match="--evaluate-only: cannot be combined with --plan-only"):
        invoke(folder, "--plan-only", "--evaluate-only")
    with pytest.raises(InputError, match="--model small: the profile was measured with model tiny"):
        invoke(folder, "--model", "small")
    with pytest.raises(InputError, match="does not contain a plan"):
        invoke(tmp_path)
    write_campaign(tmp_path / "other", PROFILE.model_copy(update={"name": "other"}))
    with pytest.raises(InputError, match="made with another profile than other"):
        invoke(folder, "--profile", str(tmp_path / "other"))
    with pytest.raises(InputError, match="calibrated for at most 2048 tokens of KV"):
        invoke(tmp_path, "--profile", str(tmp_path / "other"), "--kv-tokens", "9000")


def test_rehearsal_of_a_validation(planned, tmp_path):
    """`calibrate/on-gpu.sh validate` serves the given plan, rejects another one, and packs the
    runs.
    """
    shutil.copytree(planned, tmp_path / "out")
    plan = tmp_path / "out/plan/plan.json"
    keep(plan, ["burst-seed0"])
    done = on_gpu("validate", tmp_path / "v", tmp_path / "out", BUDGET="400s", LIMIT="900")
    assert done.returncode == 0, done.stdout + done.stderr
    assert {path.name for path in (tmp_path / "v").iterdir()} == {"log.txt", "validation.tar.gz"}
    with tarfile.open(tmp_path / "v/validation.tar.gz") as packed:
        names = packed.getnames()
    assert "validation/plan/plan.json" in names
    assert "validation/runs/burst-seed0-1/passes.csv" in names
    plan.write_text(plan.read_text().replace("burst-seed0", "other"))
    done = on_gpu("validate", tmp_path / "v", tmp_path / "out")
    assert done.returncode == 2
    assert "started with another plan" in done.stdout
