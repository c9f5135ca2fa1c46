"""Tests of `simkv gpu` for a user, on a CPU with the tiny model."""

from __future__ import annotations

import csv
import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from simkv.cli import app, gpu_options
from simkv.conformance.decision_replay import check_trace
from simkv.conformance.decision_trace import read_trace
from simkv.core.errors import InputError

SCENARIO = """
name: short
workload:
  arrivals: {num_prompts: 12, request_rate: 60.0, prompt_tokens: 20, output_tokens: 8}
engine: {name: vllm, num_gpu_blocks: 12, max_model_len: 64, max_num_seqs: 8}
profile: unit-step
variants:
  async: {}
  sync: {engine: {async_scheduling: false}}
"""


@pytest.fixture
def served(tmp_path):
    """Return a scenario file and the folder of its run."""
    path = tmp_path / "short.yaml"
    path.write_text(SCENARIO)
    out = tmp_path / "out"
    arguments = ["gpu", "run", str(path), "--device", "cpu", "--model", "tiny", "--out", str(out)]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert result.output.count("all equal") == 2
    return out


def test_serve_writes_all_files(served):
    files = {path.name for path in served.iterdir()}
    traces = {"decisions-async.jsonl.gz", "decisions-sync.jsonl.gz"}
    assert files == traces | {"passes.csv", "requests.csv", "scenario.yaml", "summary.json"}
    for trace in traces:
        assert check_trace(read_trace(served / trace)).difference is None
    summary = json.loads((served / "summary.json").read_text())
    assert summary["setup"]["shape"]["name"] == "tiny"
    assert summary["machine"]["torch"]
    found = summary["variants"]["sync"]
    assert found["finished"] == 12
    assert found["total_output_tokens"] == 96
    assert 0 < found["device_share"] < 1
    with (served / "passes.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["kind"] != "idle"]
    for row in rows:
        host = [float(row[name]) for name in ("schedule_s", "prepare_s", "launch_s", "wait_s")]
        # The first step of a pipelined engine is decided before its time starts.
        assert row["variant"] == "async" or sum(host) <= float(row["seconds"])
        assert float(row["gpu_s"]) <= float(row["seconds"])
    emitted = sum(int(row["decode_seqs"]) + int(row["prefill_seqs"]) for row in rows)
    assert emitted >= 2 * 96
    with (served / "requests.csv").open() as file:
        assert all(row["outcome"] == "finished" for row in csv.DictReader(file))


def test_replay_finds_a_changed_time(served):
    result = CliRunner().invoke(app, ["gpu", "replay", str(served)], catch_exceptions=False)
    assert result.exit_code == 0
    assert result.output.count("ok") == 2
    path = served / "passes.csv"
    header, first, *rest = path.read_text().splitlines()
    assert first.startswith("async,prefill,")
    row = first.split(",")
    # all other requests arrive during the first step
    row[header.split(",").index("seconds")] = "10.0"
    path.write_text("\n".join([header, ",".join(row), *rest]))
    result = CliRunner().invoke(app, ["gpu", "replay", str(served)], catch_exceptions=False)
    assert result.exit_code == 1
    assert "async: differs at decision" in result.output
    assert "sync: ok" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "tinny"], "did you mean 'tiny'"),
        (["--model", "tiny", "--device", "gpu"], "expected cuda, cuda:<n> or cpu"),
        (
            ["--model", "tiny", "--device", "mps"],
            "simkv runs on NVIDIA GPUs .* torch for ROCm shows",
        ),
        (["--model", "tiny", "--variant", "asinc"], "did you mean 'async'"),
        (
            ["--model", "llama-3-8b"],
            "11 KV blocks .* do not fit .* use at most 0 KV blocks",
        ),
    ],
)
def test_unsupported_scenario_is_rejected(arguments, message, tmp_path):
    path = tmp_path / "short.yaml"
    path.write_text(SCENARIO)
    if "--device" not in arguments:
        arguments = [*arguments, "--device", "cpu"]
    with pytest.raises(InputError, match=message):
        CliRunner().invoke(app, ["gpu", "run", str(path), *arguments], catch_exceptions=False)
    assert [file.name for file in tmp_path.iterdir()] == ["short.yaml"]


def test_error_without_torch_names_the_package(monkeypatch, tmp_path):
    path = tmp_path / "short.yaml"
    path.write_text(SCENARIO)
    monkeypatch.setattr(gpu_options, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"simkv\[gpu\]"):
        CliRunner().invoke(app, ["gpu", "run", str(path)], catch_exceptions=False)


def test_replay_of_another_scenario_is_rejected(tmp_path):
    with pytest.raises(InputError, match="not a directory written by `simkv gpu run`"):
        CliRunner().invoke(app, ["gpu", "replay", str(tmp_path)], catch_exceptions=False)


def test_other_commands_need_no_torch():
    served = "simkv.validation.gpu_runs"
    modules = f"simkv, simkv.cli.gpu, simkv.validation.zoo, {served}.gpu_report, "
    modules += f"{served}.validation_suite"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
