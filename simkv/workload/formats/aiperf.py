"""Reader of NVIDIA aiperf's per-request export ``profile_export.jsonl`` (JSON lines).

``metadata`` has ``request_start_ns`` (Unix time; the first request is time 0), ``benchmark_phase``
and ``was_cancelled``. ``metrics`` has values with their units: ``input_sequence_length`` and
``output_sequence_length`` in tokens, ``time_to_first_token``, ``inter_token_latency`` and
``request_latency``. Warm-up requests, cancelled requests and requests with an ``error`` are left
out and counted (github.com/ai-dynamo/aiperf, docs/tutorials/working-with-profile-exports.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from simkv.workload.column_values import describe_found
from simkv.workload.formats.trace_format import FileHead, MeasuredLatencies, TraceFormat
from simkv.workload.json_records import (
    json_integer,
    json_records,
    json_time,
    make_column,
)
from simkv.workload.request_columns import RequestRows
from simkv.workload.trace_source import TraceSource, select_served

_MS = {"ns": 1e-6, "us": 1e-3, "ms": 1.0, "s": 1e3, "sec": 1e3}


def _outcome(record: dict[str, Any]) -> str | None:
    """Return the reason to leave out a request, or None."""
    metadata = record["metadata"]
    if metadata.get("benchmark_phase", "profiling") != "profiling":
        return "from the warm-up"
    if metadata.get("was_cancelled"):
        return "cancelled"
    return "with an error" if record.get("error") else None


def _check(record: dict[str, Any]) -> None:
    for name in ("metadata", "metrics"):
        if not isinstance(record.get(name), dict):
            raise ValueError(f"{name}: should be an object; {describe_found(record.get(name))}")
    json_time(record["metadata"], "request_start_ns")
    if _outcome(record) is None:
        for name in ("input_sequence_length", "output_sequence_length"):
            _tokens(record, name)


def _tokens(record: dict[str, Any], name: str) -> int:
    metric = record["metrics"].get(name)
    return json_integer({name: metric.get("value")} if isinstance(metric, dict) else {}, name)


def _rows(source: TraceSource) -> Iterator[RequestRows]:
    with source.text() as lines:
        for some in json_records(source, _check, lines):
            reasons = [_outcome(record) for record in some.records]
            for reason in sorted({r for r in reasons if r}):
                source.failed(reason, make_column((r == reason for r in reasons), bool), some.lines)
            kept = [index for index, reason in enumerate(reasons) if reason is None]
            records = [some.records[index] for index in kept]
            starts = make_column((r["metadata"]["request_start_ns"] for r in records), np.int64)
            rows = RequestRows(
                arrival=source.since_first(starts) / 1e9,
                prompt_tokens=make_column(
                    (_tokens(r, "input_sequence_length") for r in records), np.int64
                ),
                output_tokens=make_column(
                    (_tokens(r, "output_sequence_length") for r in records), np.int64
                ),
                number=some.numbers[kept],
            )
            yield select_served(source, rows, [some.lines[index] for index in kept])


def _measured(record: dict[str, Any]) -> MeasuredLatencies:
    def ms(name: str) -> float:
        metric = record["metrics"].get(name)
        if not isinstance(metric, dict) or metric.get("unit") not in _MS:
            return float("nan")
        return float(json_time({name: metric.get("value")}, name) * _MS[metric["unit"]])

    return MeasuredLatencies(
        ms("time_to_first_token"), ms("inter_token_latency"), ms("request_latency"), None
    )


def _known(head: FileHead) -> bool:
    return head.kind == "json" and head.has("metadata", "metrics", "request_start_ns")


AIPERF = TraceFormat(
    "aiperf",
    "requests of NVIDIA's aiperf, profile_export.jsonl (JSON lines)",
    _known,
    _rows,
    _measured,
)
