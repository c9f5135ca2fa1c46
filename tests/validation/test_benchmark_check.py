"""Tests of predicting results of load generators from a launch line, and of fitting step times to
the results.

The measured files are written by simkv itself, so that the true step times are known.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from simkv.core.errors import InputError
from simkv.core.figure_registry import METRICS, figure
from simkv.metrics.scenario_runner import run_scenario
from simkv.scenario.scenario_builder import build_scenario
from simkv.scenario.scenario_loader import resolve_variants
from simkv.scenario.scenario_options import ScenarioOptions
from simkv.validation.benchmark_check import (
    Calibration,
    CalibrationCase,
    build_benchmark_scenario,
    build_other_protocols,
    check_benchmark,
    fit_calibration,
    leave_one_out,
)
from simkv.validation.benchmark_results import read_benchmark, read_benchmarks
from tests.cli.test_cli import Simkv

SERVER = ScenarioOptions(gpu="H100", from_command="vllm serve meta-llama/Llama-3.1-8B")
BLOCK = """\
============ Serving Benchmark Result ============
Successful requests:                     200
Maximum request concurrency:             16
Request rate configured (RPS):           12.50
Benchmark duration (s):                  17.31
Total input tokens:                      40,000
Total generated tokens:                  10000
Request throughput (req/s):              11.55
Output token throughput (tok/s):         577.64
---------------Time to First Token----------------
Mean TTFT (ms):                          41.20
Median TTFT (ms):                        38.00
P99 TTFT (ms):                           77.10
-----Time per Output Token (excl. 1st token)------
Mean TPOT (ms):                          9.31
----------------End-to-end Latency----------------
Mean E2EL (ms):                          500.00
==================================================
"""


def measured(folder: Path, rate: float, truth: Calibration | None = None) -> Path:
    """Write the result of a simulated benchmark at a request rate, with the file name of ``vllm
    bench serve``.
    """
    load = {"num_prompts": 60, "input_len": 400, "output_len": 60, "request_rate": rate}
    options = ScenarioOptions(gpu="H100", from_command=SERVER.from_command, **load)  # type: ignore[arg-type]
    scenario = resolve_variants(build_scenario(options).document)["run"]
    if truth:
        scenario = truth.apply(scenario)
    summary = run_scenario(scenario, Path(), intervals=False).summary
    result: dict[str, Any] = {
        "completed": 60,
        "total_input_tokens": 60 * 400,
        "total_output_tokens": 60 * 60,
        "request_rate": rate,
        "burstiness": 1.0,
        "max_concurrency": None,
        "output_throughput": summary["output_throughput"],
    }
    for name in ("ttft", "tpot", "e2e"):
        for kind in ("mean", "p99"):
            spelling = "e2el" if name == "e2e" else name
            result[f"{kind}_{spelling}_ms"] = figure(summary, f"{name}_ms.{kind}")
    path = folder / f"rate-{rate:g}.json"
    path.write_text(json.dumps(result))
    return path


def test_prediction_of_the_same_server_has_no_error(tmp_path: Path) -> None:
    benchmark = read_benchmark(measured(tmp_path, 8.0))
    scenario, _ = build_benchmark_scenario(benchmark, SERVER)
    checked = check_benchmark(benchmark, scenario)
    assert {one.name for one in checked.figures} >= {"ttft_ms.p99", "output_throughput"}
    assert max(abs(one.error) for one in checked.figures) < 1e-9
    assert any("mean lengths" in cause for cause in checked.causes)


def test_printed_block_equals_json(tmp_path: Path) -> None:
    (tmp_path / "block.txt").write_text(BLOCK)
    found = read_benchmark(tmp_path / "block.txt")
    assert found.requests == 200
    assert found.load == {
        "num_prompts": 200,
        "request_rate": 12.5,
        "max_concurrency": 16,
        "input_len": 200,
        "output_len": 50,
    }
    assert found.figures["ttft_ms.p99"] == 77.1
    assert found.figures["e2e_ms.mean"] == 500.0
    assert found.figures["output_throughput"] == 577.64


def test_lines_of_sglang_are_read(tmp_path: Path) -> None:
    line = {"completed": 10, "total_input_tokens": 1000, "total_output_tokens": 100}
    line |= {"mean_e2e_latency_ms": 90.5, "median_ttft_ms": 20.0, "request_rate": "inf"}
    old = {**line, "median_ttft_ms": 1.0}
    (tmp_path / "sglang.jsonl").write_text(f"{json.dumps(old)}\n{json.dumps(line)}\n")
    found = read_benchmark(tmp_path / "sglang.jsonl")
    assert found.figures == {"e2e_ms.mean": 90.5, "ttft_ms.median": 20.0}
    assert found.load == {"num_prompts": 10, "input_len": 100, "output_len": 10}


def guidellm(strategy: dict[str, Any], ttft: float, requests: int = 0) -> dict[str, Any]:
    """Return a benchmark of a guidellm report with 20 requests of 200 and 20 tokens."""

    def spread(mean: float) -> dict[str, Any]:
        return {
            "successful": {"mean": mean, "count": 20, "percentiles": {"p99": 2 * mean}},
            "incomplete": None,
        }

    listed = [
        {
            "request_id": str(i),
            "request_start_time": 1e9 + i,
            "request_end_time": 1e9 + i + 0.3,
            "prompt_tokens": 200,
            "output_tokens": 20,
            "time_to_first_token_ms": ttft,
        }
        for i in range(requests)
    ]
    return {
        "config": {"strategy": strategy},
        "duration": 4.0,
        "metrics": {
            "request_latency": spread(0.3),
            "prompt_token_count": spread(200.0),
            "output_token_count": spread(20.0),
            "time_to_first_token_ms": spread(ttft),
            "inter_token_latency_ms": spread(8.0),
        },
        "requests": {"successful": listed, "incomplete": [], "errored": []},
    }


def test_each_load_of_a_guidellm_report_is_one_result(tmp_path: Path) -> None:
    loads = [
        guidellm({"type_": "constant", "rate": 5.0}, 40.0, requests=20),
        guidellm({"type_": "concurrent", "streams": 8}, 60.0),
        guidellm({"type_": "synchronous"}, 30.0),
    ]
    (tmp_path / "sweep.json").write_text(json.dumps({"benchmarks": loads}))
    rate, streams, single = read_benchmarks(tmp_path / "sweep.json")
    assert rate.short_name == "sweep.json (constant, 5 req/s)"
    assert rate.load["request_rate"] == 5.0
    assert streams.load == {
        "num_prompts": 20,
        "input_len": 200,
        "output_len": 20,
        "max_concurrency": 8,
    }
    assert single.load["max_concurrency"] == 1
    assert streams.figures["ttft_ms.p99"] == 120.0
    assert streams.figures["tpot_ms.mean"] == 8.0
    assert streams.figures["e2e_ms.mean"] == 300.0
    assert streams.figures["output_throughput"] == 100.0


def test_requests_of_concurrent_streams_are_not_replayed_at_recorded_times(tmp_path: Path) -> None:
    path = tmp_path / "one.json"
    load = guidellm({"type_": "concurrent", "streams": 4}, 40.0, requests=20)
    path.write_text(json.dumps({"benchmarks": [load]}))
    (found,) = read_benchmarks(path)
    assert found.load == {"trace": path, "max_concurrency": 4, "request_rate": math.inf}
    assert found.figures["ttft_ms.mean"] == 40.0


def test_load_without_successful_requests_is_one_message(tmp_path: Path) -> None:
    load = guidellm({"type_": "synchronous"}, 30.0)
    load["metrics"]["request_latency"]["successful"]["count"] = 0
    (tmp_path / "empty.json").write_text(json.dumps({"benchmarks": [load]}))
    with pytest.raises(InputError, match=r"benchmarks\[0\]: contains no successful request"):
        read_benchmarks(tmp_path / "empty.json")


AIPERF = {
    "time_to_first_token": {"unit": "ms", "avg": 50.0, "p99": 90.0},
    "request_latency": {"unit": "s", "avg": 0.3},
    "output_token_throughput": {"unit": "tokens/sec", "avg": 133.3},
    "input_sequence_length": {"unit": "tokens", "avg": 200.0},
    "output_sequence_length": {"unit": "tokens", "avg": 20.0},
    "request_count": {"unit": "requests", "avg": 20.0},
    "input_config": {"loadgen": {"request_rate": 10.0, "concurrency": 4}},
}
INFERENCE_PERF = {
    "load_summary": {"count": 20, "requested_rate": 10.0, "concurrency": 4},
    "successes": {
        "count": 20,
        "latency": {
            "time_to_first_token": {"mean": 0.05, "p99": 0.09},
            "request_latency": {"mean": 0.3},
        },
        "throughput": {"output_tokens_per_sec": 133.3},
        "prompt_len": {"mean": 200.0},
        "output_len": {"mean": 20.0},
    },
}


@pytest.mark.parametrize("result", [AIPERF, INFERENCE_PERF], ids=["aiperf", "inference-perf"])
def test_nested_summaries_are_read(tmp_path: Path, result: dict[str, Any]) -> None:
    (tmp_path / "result.json").write_text(json.dumps(result))
    found = read_benchmark(tmp_path / "result.json")
    assert found.figures == pytest.approx(
        {
            "ttft_ms.mean": 50.0,
            "ttft_ms.p99": 90.0,
            "e2e_ms.mean": 300.0,
            "output_throughput": 133.3,
        }
    )
    assert found.load == {
        "num_prompts": 20,
        "request_rate": 10.0,
        "max_concurrency": 4,
        "input_len": 200,
        "output_len": 20,
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"completed": 0, "mean_ttft_ms": 3}', "completed: expected a number of 1 or more"),
        ('{"completed": 5, "duration": 3}', "contains no latency"),
        ('{"completed": 5, "mean_ttft_ms": 3, "mean_tpot_ms": -1}', "mean_tpot_ms: .*found -1"),
        ('{"completed": 5, "mean_ttft_ms": 3, "mean_tpot_ms": "x"}', "mean_tpot_ms: .*found 'x'"),
    ],
)
def test_unusable_result_is_one_message(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "result.json").write_text(text)
    with pytest.raises(InputError, match=message):
        read_benchmark(tmp_path / "result.json")


def test_unknown_times_and_lengths_widen_the_intervals(tmp_path: Path) -> None:
    benchmark = read_benchmark(measured(tmp_path, 8.0))
    scenario, _ = build_benchmark_scenario(benchmark, SERVER)
    others = build_other_protocols(benchmark, SERVER)
    assert len(others) == 4
    narrow = {one.name: one for one in check_benchmark(benchmark, scenario).figures}
    checked = check_benchmark(benchmark, scenario, protocols=others)
    for one in checked.figures:
        before = narrow[one.name].interval
        assert before
        assert one.interval
        assert before.low is not None
        assert one.interval.low is not None
        assert one.interval.low <= before.low
        assert (one.interval.high or math.inf) >= (before.high or math.inf)
    wider = next(one for one in checked.figures if one.name == "output_throughput")
    before = narrow["output_throughput"].interval
    assert wider.interval
    assert before
    assert wider.interval.low < 0.99 * before.low  # type: ignore[operator]
    assert any("source of error protocol" in cause for cause in checked.causes)


def test_file_with_single_requests_has_no_other_protocols(tmp_path: Path) -> None:
    path = tmp_path / "one.json"
    load = guidellm({"type_": "constant", "rate": 5.0}, 40.0, requests=20)
    path.write_text(json.dumps({"benchmarks": [load]}))
    (found,) = read_benchmarks(path)
    assert build_other_protocols(found, SERVER) == []


def test_calibration_finds_the_true_step_times(tmp_path: Path) -> None:
    truth = Calibration(1.4, 1.7, 0.012, 0.003)
    cases = []
    for rate in (4.0, 12.0, 24.0):
        benchmark = read_benchmark(measured(tmp_path, rate, truth))
        cases.append(CalibrationCase(benchmark, build_benchmark_scenario(benchmark, SERVER)[0]))
    fitted = fit_calibration(cases)
    assert fitted.decode == pytest.approx(truth.decode, rel=0.03)
    assert fitted.prefill == pytest.approx(truth.prefill, rel=0.15)
    errors = [abs(one.error) for _, figures in leave_one_out(cases) for one in figures]
    assert max(errors) < 0.05


def test_metrics_outside_their_intervals_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = measured(tmp_path, 8.0)
    result = json.loads(path.read_text())
    path.write_text(json.dumps({**result, "output_throughput": 3 * result["output_throughput"]}))
    simkv = Simkv(tmp_path, monkeypatch, capsys)
    done = simkv("validate", str(path), "--gpu", "H100", "--server", SERVER.from_command)
    assert done.code == 0, done.err
    assert re.search(r"Outside the interval: output token throughput -6\d.\d%\.", done.out)


def test_values_are_formatted_in_the_unit_of_another() -> None:
    metric = METRICS["ttft_ms.mean"]
    assert metric.format_like(150.0)(76.8) == "0.08 s"
    assert metric.format_like(76.8)(150.0) == "150 ms"
    assert METRICS["output_throughput"].format_like(1.0)(2.0) == "2 tok/s"


def test_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    simkv = Simkv(tmp_path, monkeypatch, capsys)
    files = [str(measured(tmp_path, rate)) for rate in (4.0, 12.0)]
    words = ("--gpu", "H100", "--server", SERVER.from_command)
    done = simkv("validate", *files, *words)
    assert done.code == 0, done.err
    assert done.out.count("Largest error: ") == 2
    assert "90 % interval from" in done.out
    assert "No metric is outside its interval." in done.out
    assert re.search(r"mean E2E +measured +(\S+) s  predicted +(\S+) s ", done.out)
    done = simkv("calibrate", *files, "--gpu", "H100", "--from-command", words[3], "-o", "own.yaml")
    assert done.code == 0, done.err
    assert "Errors of predictions, each fitted to the other results only:" in done.out
    again = simkv("run", tmp_path / "own.yaml", "--no-plots")
    assert again.code == 0, again.err
    assert "calibrated: mean latencies of results left out of the fit" in " ".join(
        again.out.split()
    )
    assert simkv("validate", files[0]).code == 2
