"""What travels to a machine with a GPU is what is tested here."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tarfile
import tomllib

import pytest

from tests.conftest import ROOT

SCRIPT = ROOT / "calibrate" / "on-gpu.sh"


def on_gpu(*arguments, **environment):
    """The script's first and last words, as it runs on a CPU."""
    given = {**os.environ, "REHEARSE": "1", "PYTHON": sys.executable, **environment}
    command = ["bash", str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, env=given, cwd=ROOT, capture_output=True, text=True, check=False)


def python_but(folder, module, does):
    """A Python that ``does`` something else in the place of ``module``."""
    path = folder / "python"
    path.write_text(
        f'#!/bin/sh\n[ "$2" = {module} ] && exec {does}\nexec "{sys.executable}" "$@"\n'
    )
    path.chmod(0o755)
    return str(path)


def test_wheels_are_of_the_versions_that_are_tested():
    pinned = set((ROOT / "constraints.txt").read_text().split())
    lines = (ROOT / "calibrate" / "wheels.txt").read_text().splitlines()
    wheels = {line for line in lines if line and not line.startswith("#")}
    (numpy,) = (line for line in wheels if line.startswith("numpy=="))
    assert wheels - {numpy} <= pinned
    assert {"typing_extensions", "numpy"} <= {line.split("==")[0] for line in wheels}


#: What a machine with torch and triton has, jinja2 among it; junitparser is for `simkv test` alone.
THERE = {"torch", "triton", "scipy", "pandas", "matplotlib", "rich", "typer"}
THERE |= {"jinja2", "markupsafe", "junitparser"}


def test_what_simkv_needs_is_there_or_carried():
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    lines = (ROOT / "calibrate" / "wheels.txt").read_text().splitlines()
    carried = {line.split("==")[0].replace("-", "_") for line in lines}
    assert {line.split(">=")[0].replace("-", "_") for line in needed} <= THERE | carried


def test_the_script_says_how_it_is_used(tmp_path):
    done = on_gpu()
    assert done.returncode == 2
    assert "on-gpu.sh validate OUT PLAN" in done.stderr
    done = on_gpu("validate", tmp_path / "out", tmp_path)
    assert done.returncode == 2
    assert "no such plan" in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def smoke():
    spec = importlib.util.spec_from_file_location("smoke", ROOT / "calibrate" / "smoke.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["smoke"] = module
    spec.loader.exec_module(module)
    return module


def test_every_stage_of_the_smoke_test_passes_here(smoke, tmp_path):
    given = smoke.Options(tmp_path, "cpu", "tiny", None)
    said = {name: stage.run(given) for name, stage in smoke.STAGES.items()}
    assert "torch" in said["imports"]
    assert "all the same" in said["l0"]


def test_a_rehearsal_of_the_smoke_test(tmp_path):
    done = on_gpu("smoke", tmp_path / "out", STAGES="imports")
    assert done.returncode == 0, done.stdout
    assert "1 of 1 stages passed" in done.stdout
    assert (tmp_path / "out/log.txt").read_text() == done.stdout


def test_a_stage_that_fails_or_takes_too_long_is_told_and_the_rest_goes_on(
    smoke, tmp_path, monkeypatch, capsys
):
    for name, limit_s in (("far", 0.01), ("imports", 600)):
        stage = smoke.STAGES[name]._replace(limit_s=limit_s)
        monkeypatch.setitem(smoke.STAGES, name, stage)
    monkeypatch.setattr(sys, "argv", ["smoke.py", str(tmp_path), "--stages", "far", "imports"])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # what is asked for on a GPU fails
    assert smoke.main() == 1
    first, second, *rest = capsys.readouterr().out.splitlines()
    assert first.startswith("FAIL far")
    assert "stopped after 0.01 s" in first
    assert second.startswith("FAIL imports")
    assert rest[0].startswith("FAILED far: look at simkv/gpu/triton_kernels.py")
    assert rest[-1] == "0 of 2 stages passed"
    assert "Error" in (tmp_path / "smoke-imports.log").read_text()


def test_a_rehearsal_of_the_first_command(tmp_path):
    """All of it lies in a few files in the end; what has no time left is told and left out."""
    done = on_gpu("first", tmp_path / "out", BUDGET="300", LIMIT="1200")
    assert done.returncode == 0, done.stdout
    assert "FAILED" not in done.stdout, done.stdout
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"bench.json", "log.txt", "tiny.tar.gz"}
    assert "test_device.py::test_graphs_change_nothing SKIPPED" in done.stdout  # each by its name
    with tarfile.open(tmp_path / "out/tiny.tar.gz") as packed:
        inside = {name.removeprefix("tiny/") for name in packed.getnames()}
    assert inside >= {"samples.csv", "passes.csv", "clocks.csv", "campaign.json", "profile.json"}
    python = python_but(tmp_path, "pytest", "sleep 600")
    done = on_gpu("first", tmp_path / "out", LIMIT="8", PYTHON=python)
    assert "check: STOPPED at its limit" in done.stdout
    assert "calibrate-tiny: LEFT OUT" in done.stdout
    with tarfile.open(tmp_path / "out/tiny.tar.gz") as packed:
        assert "tiny/samples.csv" in packed.getnames()  # what was there is there


def test_the_time_that_packages_take_to_install_counts(tmp_path):
    """What is left after it is a negative time, which no command is given."""
    (tmp_path / "simkv.whl").touch()
    python = python_but(tmp_path, "pip", "sleep 2")
    done = on_gpu("first", tmp_path / "out", PYTHON=python, WHEELS=str(tmp_path), LIMIT="1")
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("check", "bench", "calibrate-tiny"):
        assert f"{name}: LEFT OUT" in done.stdout
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"log.txt"}


def test_a_rehearsal_of_the_second_command(tmp_path):
    """It serves the plan that it is given and no other, and packs what there is."""
    from tests.gpu.test_validate_gpu import PROFILE, invoke

    (tmp_path / "p.json").write_text(PROFILE.model_dump_json(exclude_none=True))
    assert invoke(tmp_path, "--budget", "7s", "--repeats", "1", "--plan-only").exit_code == 0
    plan = tmp_path / "out/plan/plan.json"
    about = json.loads(plan.read_text())
    about["cases"] = [case for case in about["cases"] if case["name"] == "prefill-heavy"]
    plan.write_text(json.dumps(about))
    done = on_gpu("validate", tmp_path / "v", plan.parent, BUDGET="400")
    assert done.returncode == 0, done.stdout + done.stderr
    names = {path.name for path in (tmp_path / "v").iterdir()}
    assert names >= {"log.txt", "validation.md", "validation.json", "validation.tar.gz"}
    found = json.loads((tmp_path / "v/validation.json").read_text())
    assert found["cases"].keys() == {"prefill-heavy"}
    with tarfile.open(tmp_path / "v/validation.tar.gz") as packed:
        assert "validation/plan/plan.json" in packed.getnames()
    plan.write_text(json.dumps(about | {"profile": "another"}))
    done = on_gpu("validate", tmp_path / "v", plan.parent)
    assert done.returncode == 2
    assert "has begun with another plan" in done.stdout
