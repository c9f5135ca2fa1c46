"""Tests that the wheel alone is sufficient: it is installed into an empty environment, outside the
checkout.

The wheel is the file named by ``SIMKV_WHEEL``, such as the compiled wheel in CI, or a pure Python
wheel built here.
"""

from __future__ import annotations

import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from tests.conftest import ROOT

#: A scenario that is not part of the wheel, with a packaged profile.
QUEUE = """\
name: queue
engine: {name: vllm, num_gpu_blocks: 600, max_model_len: 4096}
workload:
  arrivals: {num_prompts: 20, request_rate: 2, prompt_tokens: 256, output_tokens: 32}
fleet: {replicas: 1, router: least_loaded}
profile: l4-mistralrs-pr2034
"""
#: A scenario with hardware, like the first scenario of a new user.
CHAT = """\
name: chat
engine: {name: vllm, max_model_len: 8192}
workload:
  arrivals: {num_prompts: 20, request_rate: 2, prompt_tokens: 256, output_tokens: 32}
hardware: {gpu: H100-SXM, model: llama-3.1-70b, weights: fp8, tp: 2}
"""
#: Commands in an empty folder, and texts that their output must contain.
SESSION = {
    "zoo mistralrs-forty": "expectations of 1 incidents hold",
    "run --exit-zero queue.yaml": "queue",
    "report runs/queue --out queue.html": "",
    "plan queue.yaml --smallest fleet.replicas=1..3 --slo unserved<=0": "fleet.replicas",
    "profiles llama 70b": "meta-llama/Llama-3.1-70B",
    "plan chat.yaml --smallest fleet.replicas=1..3 --slo unserved<=0 --repeats 1 --no-cliff "
    "--over hardware.gpu=H100-SXM,L40S": "hardware.gpu=L40S: fleet.replicas = 1, 2 GPUs",
    "blocks --model Llama-3.1-8B --gpu RTX-4090": "num_gpu_blocks: ",
}


def call(*command: str | Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command in a folder, without the packages of this environment."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return subprocess.run(command, cwd=folder, env=ours, capture_output=True, text=True)


def test_wheel_runs_in_empty_environment(tmp_path: Path) -> None:
    there = call(*_pip(sys.executable), "download", "--no-deps", "simpy", folder=tmp_path)
    if there.returncode:
        pytest.skip(f"no package index to be had: {there.stderr.strip()[-200:]}")
    built = call(
        *_pip(sys.executable), "wheel", "--no-deps", "--wheel-dir", "dist", ROOT, folder=tmp_path
    )
    assert built.returncode == 0, built.stderr
    (pure,) = (tmp_path / "dist").glob("simkv-*.whl")
    assert pure.name.endswith("-py3-none-any.whl")  # no compiler was used
    names = zipfile.ZipFile(pure).namelist()
    # contains neither dev nor tests
    assert {name.split("/")[0].split("-")[0] for name in names} == {"simkv"}
    wheel = os.environ.get("SIMKV_WHEEL", pure)
    venv.create(tmp_path / "env")
    programs = tmp_path / "env" / ("Scripts" if os.name == "nt" else "bin")
    # Modules are compiled to bytecode when they are imported, because most of pandas and scipy is
    # never imported.
    install = ("install", "--no-compile", "--constraint", ROOT / "constraints.txt", wheel)
    here = ("--python", programs / "python")
    installed = call(*_pip(sys.executable), *here, *install, folder=tmp_path)
    assert installed.returncode == 0, installed.stderr
    version = call(programs / "simkv", "--version", folder=tmp_path)
    assert ("compiled" in version.stdout) is (wheel != pure), version.stdout
    home = tmp_path / "home"
    home.mkdir()
    (home / "queue.yaml").write_text(QUEUE)
    (home / "chat.yaml").write_text(CHAT)
    for line, answer in SESSION.items():
        ran = call(programs / "simkv", *line.split(), folder=home)
        assert ran.returncode == 0, f"simkv {line}\n{ran.stdout}\n{ran.stderr}"
        assert answer in ran.stdout
    assert (home / "queue.html").stat().st_size > 10_000
    where = call(programs / "python", "-c", "import simkv; print(simkv.__file__)", folder=home)
    assert Path(where.stdout.strip()).is_relative_to(tmp_path / "env")


def _pip(python: str | Path) -> tuple[str, ...]:
    return str(python), "-m", "pip", "--quiet", "--disable-pip-version-check"
