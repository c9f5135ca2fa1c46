"""The native engine: the schedulers of vLLM and SGLang themselves in a simulation.

Tests of real schedulers need unpacked wheels, see ``tests/conformance/record``; they are skipped
without them. All other tests use a small package with the interface that the driver calls.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

WHEELS = Path(os.environ.get("SIMKV_WHEELS", ROOT.parent / "wheels"))

#: Scenario whose KV cache is too small for all requests.
PRESSURE = """
name: pressure
engine:
  {name: vllm, num_gpu_blocks: 60, max_model_len: 900, max_num_seqs: 8, max_num_batched_tokens: 256}
profile: unit-step
workload: {burst: {num_prompts: 12, prompt_tokens: 150, output_tokens: 90}}
"""


def wheel_of(package: str, version: str) -> Path:
    """Return the unpacked wheel, or skip the test."""
    folder = WHEELS / f"{package}-{version}"
    if not folder.is_dir():
        pytest.skip(f"no wheel of {package} {version}; SIMKV_WHEELS names the folder of wheels")
    return folder


def run_cli(*words: str) -> tuple[int, str]:
    """Run the command line; return the exit code and the output."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", "simkv", *words], capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("version", ["0.9.2", "0.19.1", "0.28.0", "0.33.0"])
def test_vllm_source_equals_port(tmp_path: Path, version: str) -> None:
    wheel = wheel_of("vllm", version)
    scenario = tmp_path / "scenario.yaml"
    scenario.write_text(PRESSURE)
    for name, more in {
        "port": ["--set", f"engine.variant={version}"],
        "native": ["--source", str(wheel), "--trust"],
    }.items():
        out = ["--out", str(tmp_path / name), "--no-plots", "--exit-zero"]
        code, text = run_cli("run", str(scenario), *more, *out)
        assert code == 0, text
    port, native = (tmp_path / name / "requests.csv" for name in ("port", "native"))
    assert port.read_bytes() == native.read_bytes()


def test_source_requires_trust(tmp_path: Path) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm/__init__.py").write_text("")
    code, text = run_cli(
        "run", str(ROOT / "scenarios/vllm-44594-watermark.yaml"), "--source", str(tmp_path)
    )
    assert code == 2
    assert "--trust" in text


def test_missing_source_is_named(tmp_path: Path) -> None:
    scenario = str(ROOT / "scenarios/vllm-44594-watermark.yaml")
    code, text = run_cli("run", scenario, "--source", str(tmp_path / "no"), "--trust")
    assert code == 2
    assert "does not exist" in text


def test_engine_without_driver_is_refused(tmp_path: Path) -> None:
    scenario = str(ROOT / "scenarios/mistralrs-six.yaml")
    code, text = run_cli("run", scenario, "--source", str(tmp_path), "--trust")
    assert code == 2
    assert "port of mistralrs" in text
