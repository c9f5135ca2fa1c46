"""Predictions judged by published results with launch lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dev.served_results import calibrate, predict, read_results
from simkv.validation.benchmark_check import CheckedBenchmark

ROW: dict[str, Any] = {
    "id": "a",
    "gpu": "NVIDIA H100 80GB HBM3",
    "model": "Qwen/Qwen3-14B",
    "engine": "vllm",
    "engine_version": "0.11.0",
    "launch_is": "command",
    "launch_command": "# a remark\nvllm serve Qwen/Qwen3-14B \\\n --max-num-seqs 64",
    "client": {
        "tool": "vllm bench serve",
        "dataset": "random",
        "input_len": 200,
        "output_len": 20,
        "num_prompts": 20,
        "request_rate": "inf",
        "max_concurrency": None,
    },
    "results": {"ttft_mean_ms": 300.0, "tpot_mean_ms": 12.0, "output_throughput": 900.0},
    "usable": ["throughput", "tpot", "ttft"],
    "derived": {"mean_input_tokens": 219.1, "mean_output_tokens": 197.3},
    "duplicate_of": None,
    "suspect": None,
}


def write(folder: Path, *rows: dict[str, Any]) -> Path:
    path = folder / "results.jsonl"
    path.write_text("".join(json.dumps(ROW | row) + "\n" for row in rows))
    return path


def test_reads_the_server_and_the_load_of_usable_results(tmp_path: Path) -> None:
    sharegpt = {**ROW["client"], "dataset": "sharegpt", "request_rate": 8, "max_concurrency": 4}
    parameters = {
        "launch_is": "backend parameters (the command itself is not printed)",
        "launch_command": "--max-model-len=32768",
    }
    path = write(
        tmp_path,
        {},
        {"id": "b", "client": sharegpt, "usable": ["ttft", "throughput"], **parameters},
        {"id": "c", "suspect": "why"},
        {"id": "d", "engine": "tensorrt-llm"},
        {"id": "e", "duplicate_of": "a"},
        {"id": "prefix-cache-f"},
    )
    found = {one.name: one for one in read_results(path)}
    assert sorted(found) == ["a", "b"]
    assert found["a"].options.from_command == "vllm serve Qwen/Qwen3-14B   --max-num-seqs 64"
    assert found["a"].benchmark.load == {"num_prompts": 20, "input_len": 200, "output_len": 20}
    assert found["b"].options.from_command == "vllm serve Qwen/Qwen3-14B --max-model-len=32768"
    load = {"request_rate": 8.0, "max_concurrency": 4, "input_len": 219, "output_len": 197}
    assert found["b"].benchmark.load == {"num_prompts": 20, **load}
    assert "tpot_ms.mean" not in found["b"].benchmark.figures


def test_predicts_results_and_says_why_not(tmp_path: Path) -> None:
    path = write(
        tmp_path, {}, {"id": "b", "model": "nobody/knows", "launch_command": "vllm serve x"}
    )
    found = dict(map(predict, read_results(path)))
    assert isinstance(found["a"], CheckedBenchmark)
    assert {figure.name for figure in found["a"].figures} == {
        "ttft_ms.mean",
        "tpot_ms.mean",
        "output_throughput",
    }
    assert all(figure.inside is not None for figure in found["a"].figures)
    assert "unknown model" in str(found["b"])


def test_calibrates_with_the_other_results_of_a_server(tmp_path: Path) -> None:
    """Results made by a server that is slower by a constant factor are predicted exactly."""
    path = write(tmp_path, {})
    one = read_results(path)[0]
    checked = predict(one)[1]
    assert isinstance(checked, CheckedBenchmark)
    slower = {
        "ttft_mean_ms": 1.3 * checked.figures[0].predicted,
        "tpot_mean_ms": 1.3 * checked.figures[1].predicted,
        "output_throughput": checked.figures[2].predicted / 1.3,
    }
    rows = read_results(write(tmp_path, *({"id": name, "results": slower} for name in "abc")))
    found = calibrate(rows)
    assert [name for name, _ in found] == ["a", "b", "c"]
    for _, figures in found:
        assert [figure.error for figure in figures] == pytest.approx([0.0, 0.0], abs=0.03)
