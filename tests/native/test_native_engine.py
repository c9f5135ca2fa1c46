"""Tests of the native engine, which runs the schedulers of vLLM and SGLang in a simulation.

Tests of real schedulers need unpacked wheels (see ``tests/conformance/record``) and are skipped
without them. All other tests use a small package with the interface that the driver calls.
"""

from __future__ import annotations

import csv
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from simkv.native.native_engines import NATIVE_ENGINES
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
    if package == "sglang":
        pytest.importorskip("torch")
    return folder


def run_cli(*words: str) -> tuple[int, str]:
    """Run the command line; return the exit code and the output."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", "simkv", *words], capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout + done.stderr


def copy_of(wheel: Path, folder: Path) -> Path:
    """Copy the files of an unpacked wheel that vLLM's scheduler needs, and return the copy."""
    names = ("model_executor", "models", "entrypoints", "kernels")
    ignored = shutil.ignore_patterns(*names)
    return Path(shutil.copytree(wheel, folder / "source", ignore=ignored))


def plant_smaller_budget(source: Path) -> None:
    """Make vLLM's scheduler use one token less per step than its budget."""
    scheduler = source / "vllm/v1/core/sched/scheduler.py"
    budget = "token_budget = self.max_num_scheduled_tokens"
    scheduler.write_text(scheduler.read_text().replace(budget, f"{budget} - 1"))


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


@pytest.mark.parametrize(
    ("scenario", "words"),
    [
        ("mistralrs-six", "compiled Rust code; expected an engine of vllm, sglang, trtllm, or"),
        ("fastdeploy-5796", "shares state with threads and a cache manager of Paddle"),
    ],
)
def test_engine_without_driver_is_refused(tmp_path: Path, scenario: str, words: str) -> None:
    path = str(ROOT / f"scenarios/{scenario}.yaml")
    code, text = run_cli("run", path, "--source", str(tmp_path), "--trust")
    assert code == 2
    assert words in " ".join(text.split())


#: A scheduler with the interface of TensorRT-LLM's, which runs at most two requests.
TWO_AT_A_TIME = """
from collections import namedtuple
from strenum import StrEnum
from tensorrt_llm.logger import logger
from ..llm_request import LlmRequestState

Output = namedtuple("Output", "context_requests generation_requests paused_requests")


class SimpleUnifiedScheduler:
    def __init__(self, **options):
        self.options = options

    def schedule_request(self, active, inflight):
        logger.debug("schedule")
        due = [r for r in active if r.state != LlmRequestState.GENERATION_TO_COMPLETE][:2]
        contexts = [r for r in due if r.is_context_init_state]
        return Output(contexts, [r for r in due if r not in contexts], [])
"""


TWO = """
name: two
engine: {name: trtllm}
profile: unit-step
workload: {burst: {num_prompts: 4, prompt_tokens: 10, output_tokens: 5}}
"""


def test_trtllm_source_decides(tmp_path: Path) -> None:
    file = tmp_path / "tensorrt_llm/_torch/pyexecutor/scheduler/scheduler.py"
    file.parent.mkdir(parents=True)
    (tmp_path / "tensorrt_llm/__init__.py").write_text("")
    file.write_text(TWO_AT_A_TIME)
    scenario = tmp_path / "scenario.yaml"
    scenario.write_text(TWO)
    out = ["--out", str(tmp_path / "out"), "--no-plots"]
    code, text = run_cli("run", str(scenario), "--source", str(tmp_path), "--trust", *out)
    assert code == 0, text
    assert "KV blocks, C++ objects in TensorRT-LLM, are stubs" in " ".join(text.split())
    with (tmp_path / "out/requests.csv").open() as rows:
        ended = [float(row["finish_s"]) for row in csv.DictReader(rows)]
    assert ended[0] == ended[1] < ended[2] == ended[3]
    code, text = run_cli("run", str(scenario), "--against", str(tmp_path), "--trust")
    assert (code, "first difference at step 1" in text) == (1, True), text


def debug(
    folder: Path, scenario: str, *, source: Path, step: int, typed: str
) -> subprocess.CompletedProcess[str]:
    """Run a scenario with the debugger, whose input is ``typed``."""
    path = folder / "scenario.yaml"
    path.write_text(scenario)
    words = ["run", path, "--source", source, "--trust", "--no-plots", "--out", folder / "out"]
    return subprocess.run(
        [sys.executable, "-P", "-m", "simkv", *map(str, words), "--pdb-at-step", str(step)],
        input=typed,
        capture_output=True,
        text=True,
        check=False,
    )


def test_debugger_stops_in_the_scheduler_of_the_source(tmp_path: Path) -> None:
    file = tmp_path / "tensorrt_llm/_torch/pyexecutor/scheduler/scheduler.py"
    file.parent.mkdir(parents=True)
    (tmp_path / "tensorrt_llm/__init__.py").write_text("")
    file.write_text(TWO_AT_A_TIME)
    done = debug(tmp_path, TWO, source=tmp_path, step=2, typed="p self.options\nc\n")
    assert "scheduler.py(14)schedule_request()" in done.stdout
    assert "(Pdb) {" in done.stdout
    assert done.returncode == 0, done.stderr


def test_native_option_of_a_branch_is_checked(tmp_path: Path) -> None:
    wheel = wheel_of("vllm", "0.33.0")
    path = tmp_path / "scenario.yaml"
    for options, words in {
        "{new_flag: 3}": "native_options.new_flag: no CacheConfig or SchedulerConfig",
        "{max_num_seqs: 3}": "set engine.max_num_seqs instead",
    }.items():
        given = f"name: vllm, native_options: {options}, num_gpu_blocks"
        path.write_text(PRESSURE.replace("name: vllm, num_gpu_blocks", given))
        code, text = run_cli("run", str(path), "--source", str(wheel), "--trust")
        assert code == 2
        assert words in text


def test_options_of_sglang_are_found_in_both_layouts(tmp_path: Path) -> None:
    srt = tmp_path / "sglang/srt"
    (srt / "arg_groups/fields").mkdir(parents=True)
    (srt / "server_args.py").write_text("class ServerArgs:\n    page_size: int = 1\n")
    (srt / "arg_groups/fields/lora.py").write_text("class LoraArgs:\n    new_flag: int = 1\n")
    found = NATIVE_ENGINES["sglang"].options(tmp_path)
    assert found == {"page_size": "ServerArgs", "new_flag": "ServerArgs"}


def test_same_bytes_each_run(tmp_path: Path) -> None:
    wheel = wheel_of("vllm", "0.33.0")
    path = tmp_path / "scenario.yaml"
    path.write_text(PRESSURE)
    for name in "ab":
        out = ["--out", str(tmp_path / name), "--no-plots", "--ledger"]
        code, text = run_cli("run", str(path), "--source", str(wheel), "--trust", *out)
        assert code == 0, text
    for file in ("requests.csv", "summary.json", "ledger.csv", "scenario.yaml"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def test_against_names_the_first_difference(tmp_path: Path) -> None:
    source = copy_of(wheel_of("vllm", "0.33.0"), tmp_path)
    path = tmp_path / "scenario.yaml"
    path.write_text(PRESSURE)
    given = ["run", str(path), "--trust", "--against"]
    code, text = run_cli(*given, str(source))
    assert (code, "identical over" in text) == (0, True), text
    plant_smaller_budget(source)
    code, text = run_cli(*given, str(source))
    assert code == 1
    assert "first difference at step 1 (0 s): tokens" in text


def test_copies_to_host_memory_are_identical() -> None:
    wheel = wheel_of("vllm", "0.33.0")
    scenario = str(ROOT / "scenarios/vllm-33526-load-behind-a-load.yaml")
    words = ["--variant", "loads-at-10-gb-s", "--against", str(wheel), "--trust"]
    code, text = run_cli("run", scenario, *words)
    assert (code, "identical over 129 steps" in text) == (0, True), text


#: Host memory is too small for all conversations, so blocks are read from disk.
ON_DISK = """
name: on-disk
profile: unit-step
offload: {bytes_per_token: 131072, host_gb_s: 20, disk_read_gb_s: 5, disk_write_gb_s: 5}
engine:
  name: vllm
  variant: 0.33.0
  num_gpu_blocks: 130
  num_cpu_blocks: 88
  max_model_len: 2048
  secondary_tiers: [fs]
workload:
  sessions:
    num_sessions: 10
    turns: 3
    request_rate: 0.02
    think_time: 200
    prompt_tokens: {distribution: lognormal, mean: 150}
    output_tokens: {distribution: lognormal, mean: 40}
    seed: 1
"""


def test_disk_tier_is_identical(tmp_path: Path) -> None:
    wheel = wheel_of("vllm", "0.33.0")
    path, out = tmp_path / "scenario.yaml", tmp_path / "out"
    path.write_text(ON_DISK)
    words = ["--trust", "--no-plots", "--out", str(out)]
    code, text = run_cli("run", str(path), "--against", str(wheel), "--trust")
    assert (code, "identical over" in text) == (0, True), text
    code, text = run_cli("run", str(path), "--source", str(wheel), *words)
    assert code == 0, text
    (figures,) = json.loads((out / "summary.json").read_text())["variants"].values()
    assert figures["kv_tiers"]["read_tokens"] > 0


def test_debugger_stops_in_the_real_scheduler(tmp_path: Path) -> None:
    wheel = wheel_of("vllm", "0.33.0")
    typed = "p self.__class__.__module__\nc\n"
    done = debug(tmp_path, PRESSURE, source=wheel, step=3, typed=typed)
    assert "(Pdb) 'vllm.v1.core.sched." in done.stdout
    assert done.returncode == 0, done.stderr
