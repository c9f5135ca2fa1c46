"""Tests of scripts and packages for a machine with a GPU, executed on a CPU."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tarfile
import tomllib

import pytest

from tests.conftest import ROOT

SCRIPT = ROOT / "calibrate" / "on-gpu.sh"


def on_gpu(*arguments, **environment):
    """Run the script on a CPU as on a GPU machine."""
    given = {**os.environ, "REHEARSE": "1", "PYTHON": sys.executable, **environment}
    command = ["bash", str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, env=given, cwd=ROOT, capture_output=True, text=True, check=False)


def python_but(folder, module, does):
    """Return a Python that runs the command ``does`` instead of ``module``."""
    path = folder / "python"
    path.write_text(
        f'#!/bin/sh\n[ "$2" = {module} ] && exec {does}\nexec "{sys.executable}" "$@"\n'
    )
    path.chmod(0o755)
    return str(path)


def test_wheels_have_the_tested_versions():
    pinned = set((ROOT / "constraints.txt").read_text().split())
    lines = (ROOT / "calibrate" / "wheels.txt").read_text().splitlines()
    wheels = {line for line in lines if line and not line.startswith("#")}
    assert wheels <= pinned
    assert "numpy" not in {line.split("==")[0] for line in wheels}  # torch contains its own


#: Packages on a machine with torch and triton; only `simkv test` needs junitparser.
PRESENT = {"torch", "triton", "scipy", "pandas", "matplotlib", "rich", "typer", "numpy"}
PRESENT |= {"jinja2", "markupsafe", "junitparser", "packaging"}


def test_all_dependencies_are_present_or_packed():
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    lines = (ROOT / "calibrate" / "wheels.txt").read_text().splitlines()
    carried = {line.split("==")[0].replace("-", "_") for line in lines}
    assert {line.split(">=")[0].replace("-", "_") for line in needed} <= PRESENT | carried


def test_tree_is_small_enough_to_upload():
    tracked = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if tracked.returncode:
        pytest.skip("not a git checkout")
    paths = [ROOT / name for name in tracked.stdout.split("\0") if name]
    size = sum(path.stat().st_size for path in paths if path.is_file())
    assert size < 56 << 20  # limit of 64 MB, including wheels of less than 8 MB


def test_script_prints_its_usage(tmp_path):
    done = on_gpu()
    assert done.returncode == 2
    assert "on-gpu.sh validate  OUT IN" in done.stderr
    done = on_gpu("validate", tmp_path / "out", tmp_path / "none")
    assert done.returncode == 2
    assert "none: not a directory" in done.stderr
    assert not (tmp_path / "out").exists()
    done = on_gpu("validate", tmp_path / "out", tmp_path)
    assert done.returncode == 2
    assert "contains no plan" in done.stdout


@pytest.fixture(scope="module")
def smoke():
    spec = importlib.util.spec_from_file_location("smoke", ROOT / "calibrate" / "smoke.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["smoke"] = module
    spec.loader.exec_module(module)
    return module


def test_every_stage_of_the_smoke_test_passes_on_a_cpu(smoke, tmp_path):
    given = smoke.Options(tmp_path, "cpu", "tiny")
    output = {name: stage.run(given) for name, stage in smoke.STAGES.items()}
    assert "torch" in output["imports"]
    assert "are equal in its replay" in output["l0"]


def test_smoke_test_fits_into_ten_minutes(smoke):
    assert sum(stage.limit_s for stage in smoke.STAGES.values()) < 570
    assert smoke.STAGES["imports"].limit_s == 120  # as on a fresh machine


def test_rehearsal_of_the_smoke_test_packs_its_logs(tmp_path):
    done = on_gpu("smoke", tmp_path / "out", STAGES="imports")
    assert done.returncode == 0, done.stdout
    assert "1 of 1 stages passed" in done.stdout
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"log.txt", "logs.tar.gz"}
    with tarfile.open(tmp_path / "out/logs.tar.gz") as packed:
        assert "logs/smoke-imports.log" in packed.getnames()


def test_failed_and_slow_stages_do_not_stop_the_others(smoke, tmp_path, monkeypatch, capsys):
    for name, limit_s in (("far", 0.01), ("imports", 600)):
        stage = smoke.STAGES[name]._replace(limit_s=limit_s)
        monkeypatch.setitem(smoke.STAGES, name, stage)
    monkeypatch.setattr(sys, "argv", ["smoke.py", str(tmp_path), "--stages", "far", "imports"])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # makes calls for a GPU fail
    assert smoke.main() == 1
    first, second, *rest = capsys.readouterr().out.splitlines()
    assert first.startswith("FAIL far")
    assert "stopped after 0.01 s" in first
    assert second.startswith("FAIL imports")
    assert rest[0].startswith("FAILED far: look at simkv/gpu/triton_kernels.py")
    assert rest[-1] == "0 of 2 stages passed"
    assert "Error" in (tmp_path / "smoke-imports.log").read_text()


def test_rehearsal_of_a_calibration_and_its_continuation(tmp_path):
    """A later call reads the files of the earlier call from IN and does not change IN."""
    done = on_gpu("calibrate", tmp_path / "first", BUDGET="300s", LIMIT="1200")
    assert done.returncode == 0, done.stdout
    assert "FAILED" not in done.stdout, done.stdout
    names = {"bench.json", "campaign.tar.gz", "log.txt"}
    assert {path.name for path in (tmp_path / "first").iterdir()} == names
    with tarfile.open(tmp_path / "first/campaign.tar.gz") as packed:
        inside = {name.removeprefix("campaign/") for name in packed.getnames()}
    assert inside >= {"samples.csv", "passes.csv", "clocks.csv", "campaign.json", "profile.json"}
    before = (tmp_path / "first/campaign.tar.gz").read_bytes()
    python = python_but(tmp_path, "simkv.cli", "sleep 600")
    done = on_gpu(
        "calibrate", tmp_path / "second", tmp_path / "first", LIMIT="8", BUDGET="9s", PYTHON=python
    )
    assert "bench" not in done.stdout  # IN has the result of the first call
    assert "campaign: STOPPED at its limit" in done.stdout
    assert {path.name for path in (tmp_path / "second").iterdir()} == names
    assert (tmp_path / "first/campaign.tar.gz").read_bytes() == before
    with tarfile.open(tmp_path / "second/campaign.tar.gz") as packed:
        assert "campaign/samples.csv" in packed.getnames()  # from the first call


def test_time_to_install_packages_counts(tmp_path):
    (tmp_path / "simkv.whl").touch()
    python = python_but(tmp_path, "pip", "sleep 2")
    done = on_gpu("calibrate", tmp_path / "out", PYTHON=python, WHEELS=str(tmp_path), LIMIT="1")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "bench: SKIPPED, no time is left" in done.stdout
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"log.txt"}
