"""Reader of guidellm's benchmark reports (JSON), including requests without an answer.

``benchmarks[].requests`` has lists ``successful``, ``errored`` and ``incomplete``; a request has
``request_start_time`` and ``request_end_time`` (older: ``start_time``, ``end_time``) in s since
1970, ``prompt_tokens``, ``output_tokens``, ``time_to_first_token_ms`` and
``inter_token_latency_ms`` (guidellm 0.2 to 0.8, schemas/base/request_stats.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from simkv.workload.column_values import MAX_SHOWN_CHARACTERS
from simkv.workload.formats.otel_spans import rows_from_spans
from simkv.workload.formats.trace_format import FileHead, TraceFormat
from simkv.workload.json_records import json_integer, json_time
from simkv.workload.request_columns import RequestRows
from simkv.workload.trace_source import TraceSource

if TYPE_CHECKING:
    import pandas as pd

_LISTS = ("successful", "errored", "incomplete")


def read_request_table(source: TraceSource) -> pd.DataFrame:
    """Return one row per request, in order of arrival."""
    # ``read_measured_latencies`` describes the columns.
    import pandas as pd

    with source.text() as lines:
        try:
            report = json.load(lines)
        except (ValueError, RecursionError) as error:
            raise source.error(
                f"should be JSON; found {str(error)[:MAX_SHOWN_CHARACTERS]}"
            ) from error
    rows = []
    for place, kind, record in _requests(report):
        source.tally.rows += 1
        try:
            rows.append(_row(record, answered=kind == "successful"))
        except ValueError as error:
            column, _, what = str(error).partition(": ")
            source.bad(1, f"{place}.{column}", what)
    if not rows:
        raise source.error(
            "contains no requests; guidellm writes them to the full report, not to the summary"
        )
    read = pd.DataFrame(rows).sort_values("start_s", kind="stable", ignore_index=True)
    return read.assign(arrival_s=read["start_s"] - read["start_s"].min(), line=1)


def _requests(report: Any) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield the location, outcome and record of each request."""
    benchmarks = report.get("benchmarks") if isinstance(report, dict) else None
    for number, benchmark in enumerate(benchmarks if isinstance(benchmarks, list) else ()):
        requests = benchmark.get("requests") if isinstance(benchmark, dict) else None
        for kind in _LISTS:
            some = requests.get(kind) if isinstance(requests, dict) else None
            for index, record in enumerate(some or ()):
                if isinstance(record, dict):
                    yield f"benchmarks[{number}].requests.{kind}[{index}]", kind, record


def _row(record: dict[str, Any], *, answered: bool) -> dict[str, Any]:
    def first(*names: str) -> str:
        return next((name for name in names if record.get(name) is not None), names[0])

    start = json_time(record, first("request_start_time", "start_time"))
    row: dict[str, Any] = {
        "start_s": start,
        "request": str(record.get("response_id") or record.get("request_id")),
        "prompt_tokens": json_integer({"prompt_tokens": 0} | _given(record), "prompt_tokens"),
        "output_tokens": json_integer(record, "output_tokens") if answered else 0,
        "ttft_ms": np.nan,
        "tpot_ms": np.nan,
        "e2e_ms": np.nan,
        "queue_ms": np.nan,
        "gave_up_s": np.nan,
    }
    end = record.get(first("request_end_time", "end_time"))
    if answered:
        row["ttft_ms"] = json_time(record, "time_to_first_token_ms")
        row["e2e_ms"] = 1e3 * (json_time(record, first("request_end_time", "end_time")) - start)
        if row["output_tokens"] > 1:
            steps = row["output_tokens"] - 1
            row["tpot_ms"] = (row["e2e_ms"] - row["ttft_ms"]) / steps
    elif isinstance(end, int | float) and end > start:
        row["gave_up_s"] = float(end) - start
    return row


def _given(record: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a record that are not null."""
    return {name: value for name, value in record.items() if value is not None}


def _rows(source: TraceSource) -> Iterator[RequestRows]:
    yield rows_from_spans(source, read_request_table(source))


def _known(head: FileHead) -> bool:
    return head.kind == "json" and head.has("benchmarks") and not head.has("experiments")


GUIDELLM = TraceFormat(
    "guidellm", "guidellm's benchmarks (JSON)", _known, _rows, table=read_request_table
)
