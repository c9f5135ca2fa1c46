"""Tests of measured latencies of each request, read from the files of benchmarks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from simkv.core.errors import InputError
from simkv.workload.formats.measured_latencies import read_measured_latencies
from simkv.workload.trace_reader import read_trace


def aiperf(start: float, prompt: int, output: int, **changed: Any) -> dict[str, Any]:
    """Return a record as aiperf writes it; ``start`` is in seconds."""
    metrics = {
        "input_sequence_length": {"value": prompt, "unit": "tokens"},
        "output_sequence_length": {"value": output, "unit": "tokens"},
        "time_to_first_token": {"value": 250.5, "unit": "ms"},
        "inter_token_latency": {"value": 0.01, "unit": "s"},
        "request_latency": {"value": 340.5, "unit": "ms"},
        "inter_chunk_latency": {"value": [10.0, 10.0], "unit": "ms"},
    }
    ns = 1759813207532900363 + round(1e9 * start)
    metadata = {"request_start_ns": ns, "benchmark_phase": "profiling", "was_cancelled": False}
    return {
        "metadata": {**metadata, **changed.pop("metadata", {})},
        "metrics": metrics,
        "error": None,
        **changed,
    }


def lines(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_reads_aiperf_requests_and_latencies(tmp_path: Path) -> None:
    records = [
        aiperf(0.0, 550, 10),
        aiperf(0.2, 100, 5, metadata={"was_cancelled": True}, metrics={"error_isl": {"value": 1}}),
        aiperf(0.5, 80, 1, error=None),
        aiperf(0.6, 1, 1, metrics={}, error={"code": 500}),
        aiperf(0.7, 1, 1, metadata={"benchmark_phase": "warmup"}),
    ]
    path = lines(tmp_path / "profile_export.jsonl", records)
    trace = read_trace(path)
    assert trace.format == "aiperf"
    found = [(r.arrival, r.prompt_tokens, r.output_tokens) for r in trace.requests()]
    assert found == [(0.0, 550, 10), (pytest.approx(0.5), 80, 1)]
    told = " ".join(trace.tally.lines())
    assert "1 cancelled (first: line 2); 1 from the warm-up (first: line 5)" in told
    assert "1 with an error (first: line 4)" in told
    assert read_trace(tmp_path).format == "aiperf"  # a folder is accepted instead of its file
    table = read_measured_latencies(path)
    assert table["ttft_ms"].tolist() == [250.5, 250.5]
    assert table["tpot_ms"].tolist()[0] == pytest.approx(10.0)
    assert table["tpot_ms"].isna().tolist() == [False, True]
    assert table["e2e_ms"].tolist() == [340.5, 340.5]
    assert "queued_s" not in table


def test_llmservingsim_captures_count_from_the_engine_core(tmp_path: Path) -> None:
    record = {
        "input_toks": 20,
        "output_toks": 3,
        "arrival_time": 1000.0,
        "queued_ts": 5.0,
        "scheduled_ts": 5.5,
        "first_token_ts": 6.0,
        "last_token_ts": 6.4,
    }
    path = lines(tmp_path / "requests.jsonl", [record])
    (row,) = read_measured_latencies(path).to_dict("records")
    assert (row["queue_ms"], row["ttft_ms"]) == (500.0, 1000.0)
    assert row["tpot_ms"] == pytest.approx(200.0)
    assert row["e2e_ms"] == pytest.approx(1400.0)
    assert row["queued_s"] == 0.0
    lines(path, [record, {**record, "last_token_ts": 5.9}])
    with pytest.raises(InputError, match=r"requests.jsonl:2: queued_ts.*should not decrease"):
        read_measured_latencies(path)


def test_rejects_formats_without_measured_times(tmp_path: Path) -> None:
    path = tmp_path / "r.csv"
    path.write_text("arrival_s,prompt_tokens,output_tokens\n0,1,1\n")
    with pytest.raises(InputError, match="case has no measured request times"):
        read_measured_latencies(path)


def test_bad_aiperf_records_are_reported_by_line(tmp_path: Path) -> None:
    path = lines(tmp_path / "p.jsonl", [aiperf(0, 5, 5), aiperf(1, -5, 5)])
    with pytest.raises(InputError, match=r"p.jsonl:2: input_sequence_length: should be a whole"):
        read_trace(path)
