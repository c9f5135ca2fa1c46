"""`simkv gpu validate` from the profile to the page, on a CPU with the tiny model."""

from __future__ import annotations

import csv
import json
import shutil
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from simkv.cli import app
from simkv.core.errors import InputError
from simkv.costs.cost_profile import CostProfile, StepError
from simkv.costs.hardware.model_shape import MODEL_SHAPES
from simkv.gpu.machine_info import machine_info
from simkv.validation.gpu_runs.baseline_models import roofline
from simkv.validation.gpu_runs.device_drift import drift_lines, note_sentinel, read_sentinels
from simkv.validation.gpu_runs.validation_plan_file import profile_hash

KEPT = (
    "memory-pressure", "prefill-heavy", "prefill-whole",
    "mistralrs-six-bucketed",
)  # fmt: skip
#: About what the tiny model costs on a CPU: 2 ms a step.
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
        "fit": {"points": 9, "held_out": {"all": ERROR.model_dump()}},
    }
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A validation of half of the cases, each served once."""
    path = tmp_path_factory.mktemp("validation")
    (path / "p.json").write_text(PROFILE.model_dump_json(exclude_none=True))
    run = invoke(path, "--budget", "7s", "--repeats", "1", "--plan-only")
    assert run.exit_code == 0
    assert {p.name for p in (path / "out").iterdir()} == {"plan"}
    plan = json.loads((path / "out/plan/plan.json").read_text())
    assert len(plan["cases"]) == 9
    plan["cases"] = [case for case in plan["cases"] if case["name"] in KEPT]
    (path / "out/plan/plan.json").write_text(json.dumps(plan))
    run = invoke(path, "--budget", "30m", "--repeats", "1")
    assert run.exit_code == 0, run.output
    return path


def invoke(path, *arguments):
    command = ["gpu", "validate", str(path / "out"), "--profile", str(path / "p.json"), "--small"]
    command += ["--device", "cpu", "--model", "tiny", *arguments]
    return CliRunner().invoke(app, command, catch_exceptions=False)


def test_all_three_levels(folder):
    found = json.loads((folder / "out" / "validation.json").read_text())
    assert found["skipped"] == []
    assert found["cases"].keys() == set(KEPT)
    for name, case in found["cases"].items():
        assert case["verdict"]["step"] is None, name
        assert case["verdict"]["decisions"] > 5
        assert set(case["steps"]) == {"profile", "constant step", "tokens only", "roofline"}
        assert {f["name"] for f in case["figures"]} >= {"makespan_s", "ttft_ms.p99", "peak_blocks"}
        assert all(f["interval"] for f in case["figures"])
        for model, kinds in case["steps"].items():
            for kind, error in kinds.items():
                ends = case["step_ends"][model][kind]
                assert bool(ends) is (error["points"] > 1), (name, model, kind)
                for figure, (low, high) in ends.items():
                    assert low <= error[figure] <= high, (name, model, kind, figure)
        assert len(case["stalls"]) == 1
    assert found["cases"]["memory-pressure"]["same_victims"].keys() == set(case["steps"])
    assert {(r["case"], r["beside"]) for r in found["rankings"]} >= {
        ("prefill-whole", "prefill-heavy"),
    }
    page = (folder / "out" / "validation.md").read_text()
    assert page.count("| same |") == len(KEPT)
    assert "share one scheduler" in page
    for name in ("steps.png", "figures.png"):
        assert (folder / "out" / name).read_bytes().startswith(b"\x89PNG")


def test_the_runs_are_real(folder):
    rows = list(csv.DictReader((folder / "out/runs/memory-pressure-1/passes.csv").open()))
    assert sum(int(row["preempted"]) for row in rows) > 0
    summary = json.loads((folder / "out/runs/memory-pressure-1/summary.json").read_text())
    assert summary["ceilings"]["bytes_per_s"] > 0
    assert summary["variants"]["run"]["unbacked_tokens"] == 0


def test_the_device_is_watched(folder):
    """One and the same step before, between and after the runs, and a line a second."""
    sentinels = read_sentinels(folder / "out")
    assert [s.before for s in sentinels] == [*(f"{name}-1" for name in KEPT), "the end"]
    assert all(0 < s.seconds < 1 for s in sentinels)
    assert "One and the same step took" in (folder / "out/validation.md").read_text()
    rows = list(csv.DictReader((folder / "out/clocks.csv").open()))
    assert rows
    assert all(float(row["unix_s"]) > 1e9 and float(row["load"]) > 0 for row in rows)


def test_a_device_that_changed_is_told(tmp_path):
    for before, seconds in (("a-1", 1.0), ("b-1", 1.01), ("c-1", 1.05), ("the end", 0.99)):
        note_sentinel(tmp_path, before, seconds)
    first, second = drift_lines(read_sentinels(tmp_path))
    assert "-1.0 to +5.0 %" in first
    assert second == "By more than 2 % before: c-1."
    (tmp_path / "sentinels.csv").write_text("a,b\n1,2\n")
    with pytest.raises(InputError, match="not sentinels"):
        read_sentinels(tmp_path)


def test_a_profile_of_another_device_is_refused(folder, tmp_path):
    other = PROFILE.model_copy(update={"gpu": "NVIDIA H100 80GB HBM3"})
    (tmp_path / "p.json").write_text(other.model_dump_json(exclude_none=True))
    shutil.copytree(folder / "out/plan", tmp_path / "out/plan")
    plan = tmp_path / "out/plan/plan.json"
    about = json.loads(plan.read_text())
    plan.write_text(json.dumps(about | {"profile_hash": profile_hash(other)}))
    with pytest.raises(InputError, match="a profile of NVIDIA H100 80GB HBM3, this is"):
        invoke(tmp_path, "--budget", "0.01s")
    run = invoke(tmp_path, "--budget", "0.01s", "--repeats", "1", "--allow-other-gpu")
    assert "Not served for want of time" in run.output


def test_it_goes_on_where_it_stopped(folder):
    """What is there is not served again; with no time left, what is missing is told."""
    before = (folder / "out/runs/prefill-heavy-1/passes.csv").read_bytes()
    run = invoke(folder, "--budget", "0.01s", "--repeats", "2")
    assert run.exit_code == 0
    assert (folder / "out/runs/prefill-heavy-1/passes.csv").read_bytes() == before
    assert "Not served for want of time: memory-pressure-2, prefill-heavy-2" in run.output
    assert not (folder / "out/runs/prefill-heavy-2").exists()


def test_a_decision_that_differs_is_an_error(folder, tmp_path):
    path = folder / "out/runs/mistralrs-six-bucketed-1/passes.csv"
    text = path.read_text()
    lines = text.splitlines()
    path.write_text("\n".join([*lines[:-4], ""]))  # the last steps are gone
    try:
        run = invoke(folder, "--budget", "30m", "--repeats", "1")
    finally:
        path.write_text(text)
    assert run.exit_code == 1
    assert "parts at decision" in run.output


def test_a_plan_needs_no_torch(tmp_path):
    (tmp_path / "p.json").write_text(PROFILE.model_dump_json(exclude_none=True))
    command = ["gpu", "validate", str(tmp_path / "out"), "--profile", str(tmp_path / "p.json")]
    command += ["--small", "--budget", "5s", "--repeats", "1", "--plan-only"]
    code = "import sys; sys.modules['torch'] = None; sys.argv[1:] = eval(sys.argv[1]);"
    code += "from simkv.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, repr(command)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "plan" / "plan.json").is_file()


def test_bad_input(folder):
    with pytest.raises(InputError, match="expected 1 or more"):
        invoke(folder, "--repeats", "0")
    with pytest.raises(InputError, match="expected a time such as 90s"):
        invoke(folder, "--budget", "soon")
    other = PROFILE.model_copy(update={"name": "other"})
    (folder / "p.json").write_text(other.model_dump_json(exclude_none=True))
    with pytest.raises(InputError, match="made with another profile"):
        invoke(folder)
    (folder / "p.json").write_text(PROFILE.model_dump_json(exclude_none=True))
