"""Tests of OpenTelemetry spans of served requests, with their measured times."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from simkv.core.errors import InputError
from simkv.workload.formats.measured_latencies import read_measured_latencies
from simkv.workload.trace_reader import read_trace

ATTRIBUTES = {
    "gen_ai.latency.time_to_first_token": 0.3,
    "gen_ai.latency.e2e": 2.3,
    "gen_ai.latency.time_in_queue": 0.1,
    "gen_ai.latency.time_in_model_prefill": 0.2,
    "gen_ai.latency.time_in_model_decode": 2.0,
    "gen_ai.usage.prompt_tokens": 500,
    "gen_ai.usage.completion_tokens": 11,
    "gen_ai.request.max_tokens": 64,
    "gen_ai.request.id": "cmpl-7-0",
}


def otlp(**changed: Any) -> dict[str, Any]:
    """Return a span as the collector writes it."""
    told = ATTRIBUTES | changed
    kinds = {str: "stringValue", int: "intValue", float: "doubleValue"}
    attributes = [
        {"key": k, "value": {kinds[type(v)]: str(v) if isinstance(v, int) else v}}
        for k, v in told.items()
    ]
    span = {
        "name": "llm_request",
        "startTimeUnixNano": "1768922793000000000",
        "attributes": attributes,
    }
    scopes = [{"scope": {"name": "vllm.llm_engine"}, "spans": [{"name": "other"}, span]}]
    return {"resourceSpans": [{"resource": {}, "scopeSpans": scopes}]}


def jaeger() -> dict[str, Any]:
    """Return the same span as Jaeger exports it."""
    tags = [{"key": k, "type": "string", "value": v} for k, v in ATTRIBUTES.items()]
    start = 1768922793000000
    span = {"operationName": "llm_request", "startTime": start, "duration": 2300000, "tags": tags}
    return {"data": [{"traceID": "ab", "spans": [span]}]}


def bench() -> dict[str, Any]:
    return {
        "backend": "vllm",
        "num_prompts": 2,
        "completed": 1,
        "input_lens": [500, 400],
        "output_lens": [11, 0],
        "ttfts": [0.3, 0.0],
        "itls": [[0.2] * 10, []],
        "start_times": [100.0, 101.0],
        "errors": ["", "timeout"],
    }


def guidellm() -> dict[str, Any]:
    good = {
        "request_id": "a",
        "prompt_tokens": 500,
        "output_tokens": 11,
        "request_start_time": 1768922793.0,
        "request_end_time": 1768922795.3,
        "time_to_first_token_ms": 300.0,
    }
    bad = good | {"output_tokens": None, "time_to_first_token_ms": None}
    requests = {"successful": [good], "errored": [bad], "incomplete": []}
    return {"benchmarks": [{"requests": requests}]}


def genai_perf() -> dict[str, Any]:
    start = 1768922793 * 10**9
    times = [start + 300_000_000 + n * 200_000_000 for n in range(11)]
    request = {
        "timestamp": start,
        "request_inputs": {"payload": json.dumps({"messages": [{"content": "x" * 2000}]})},
        "response_timestamps": [*times, times[-1]],
        "response_outputs": [*["data: {}"] * 11, "data: [DONE]"],
    }
    return {"experiments": [{"experiment": {"mode": "concurrency"}, "requests": [request]}]}


@pytest.mark.parametrize("made", [otlp, jaeger, bench, guidellm, genai_perf])
def test_reads_lengths_and_times(tmp_path: Path, made: Any) -> None:
    path = tmp_path / "served.json"
    path.write_text(json.dumps(made(), indent=2))
    found = read_measured_latencies(path)
    row = found[found["output_tokens"] > 0].iloc[0]
    assert (row["prompt_tokens"], row["output_tokens"]) == (500, 11)
    assert row["ttft_ms"] == pytest.approx(300.0)
    assert row["e2e_ms"] == pytest.approx(2300.0)
    assert row["tpot_ms"] == pytest.approx(200.0)
    assert len(found) == (2 if made in (bench, guidellm) else 1)
    assert len(read_trace(path)) == 1  # requests without an answer are omitted from the trace


def test_reads_queue_times_from_spans(tmp_path: Path) -> None:
    path = tmp_path / "spans.jsonl"
    path.write_text(f"{json.dumps(otlp())}\n" * 3)
    found = read_measured_latencies(path)
    assert found["queue_ms"].tolist() == pytest.approx([100.0] * 3)
    assert found["prefill_ms"].tolist() == pytest.approx([200.0] * 3)
    assert set(found["request"]) == {"cmpl-7-0"}
    assert found["max_tokens"].tolist() == [64] * 3


def test_bad_span_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "spans.jsonl"
    bad = json.dumps(otlp(**{"gen_ai.latency.e2e": -1.0}))
    path.write_text(f"{json.dumps(otlp())}\n{bad}\n")
    with pytest.raises(InputError, match=r"spans.jsonl:2: gen_ai.latency.e2e: should be a number"):
        read_measured_latencies(path)
    path.write_text(f"{json.dumps(otlp())}\n{bad[:200]}\n")
    with pytest.raises(InputError, match=r"spans.jsonl:2: row: should be JSON"):
        read_measured_latencies(path)
