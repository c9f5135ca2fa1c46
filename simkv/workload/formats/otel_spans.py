"""Reader of OpenTelemetry spans: vLLM's spans ``llm_request``, or calls of agents.

vLLM writes one span per finished request. A span starts when the API server receives the request.
Its attributes are lengths (``gen_ai.usage.*``) and times in s (``gen_ai.latency.*``). The time
``time_in_queue`` ends when the request is first scheduled (vllm/v1/engine/output_processor.py
``do_tracing``, 0.11 to 0.33). Other spans are skipped. A file without spans of vLLM may have the
spans of agents (see ``agent_spans``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from simkv.workload.formats.agent_spans import is_call, rows_from_agents
from simkv.workload.formats.telemetry_spans import Span, read_number, read_spans
from simkv.workload.formats.trace_format import FileHead, TraceFormat
from simkv.workload.request_columns import RequestRows
from simkv.workload.trace_source import TraceSource, select_served

if TYPE_CHECKING:
    import pandas as pd

SPAN_NAME = "llm_request"
_LATENCY, _USAGE = "gen_ai.latency.", "gen_ai.usage."
#: Columns in seconds, with the attribute that contains each.
_TIMES = {
    "queue": "time_in_queue",
    "prefill": "time_in_model_prefill",
    "decode": "time_in_model_decode",
    "ttft": "time_to_first_token",
    "e2e": "e2e",
}
#: Length attributes by vLLM's names and by the names of the semantic conventions.
_LENGTHS = {
    "prompt_tokens": ("prompt_tokens", "input_tokens"),
    "output_tokens": ("completion_tokens", "output_tokens"),
}


def _record(start: float, attributes: dict[str, Any]) -> dict[str, Any]:
    """Return a span as a row of numbers. Raises ValueError if a field is invalid."""
    # The message is ``column: reason``.
    if not np.isfinite(start):
        raise ValueError("start: should be a time since 1970; missing")
    row: dict[str, Any] = {"start_s": start, "request": str(attributes.get("gen_ai.request.id"))}
    for name, keys in _LENGTHS.items():
        row[name] = int(read_number(attributes, *(_USAGE + key for key in keys)))
    for name, key in _TIMES.items():
        optional = name in ("prefill", "decode")
        there = _LATENCY + key in attributes
        row[name] = read_number(attributes, _LATENCY + key) if there or not optional else np.nan
    asked = "gen_ai.request.max_tokens"
    row["max_tokens"] = int(read_number(attributes, asked)) if attributes.get(asked) else 0
    return row


def read_request_table(source: TraceSource) -> pd.DataFrame:
    """Return one row per request, in order of arrival."""
    # ``read_measured_latencies`` describes the columns.
    return _table(source, read_spans(source))


def _table(source: TraceSource, spans: Iterable[Span]) -> pd.DataFrame:
    import pandas as pd

    rows = []
    for span in spans:
        if span.name != SPAN_NAME:
            continue
        source.tally.rows += 1
        try:
            rows.append(_record(span.start, span.attributes) | {"line": span.line})
        except ValueError as error:
            column, _, what = str(error).partition(": ")
            source.bad(span.line, column, what)
    if not rows:
        raise source.error(f"contains no span named {SPAN_NAME} from vLLM")
    read = pd.DataFrame(rows).sort_values("start_s", kind="stable", ignore_index=True)
    steps = (read["output_tokens"] - 1).where(read["output_tokens"] > 1)
    decode = read["decode"].fillna(read["e2e"] - read["ttft"])
    return read.assign(
        arrival_s=read["start_s"] - read["start_s"].min(),
        tpot_ms=1e3 * decode / steps,
        **{f"{name}_ms": 1e3 * read[name] for name in ("queue", "prefill", "ttft", "e2e")},
    ).drop(columns=list(_TIMES))


def rows_from_spans(source: TraceSource, read: pd.DataFrame) -> RequestRows:
    """Return the requests with an answer as rows. ``read`` is the table of all requests."""
    rows = RequestRows(
        arrival=read["arrival_s"].to_numpy(np.float64),
        prompt_tokens=read["prompt_tokens"].to_numpy(np.int64),
        output_tokens=read["output_tokens"].to_numpy(np.int64),
        number=np.arange(len(read), dtype=np.int64),
    )
    if "max_tokens" in read:
        asked, emitted = read["max_tokens"], read["output_tokens"]
        rows.max_tokens = asked.where(asked == 0, np.maximum(asked, emitted)).to_numpy(np.int64)
    return select_served(source, rows, read["line"].tolist())


def _rows(source: TraceSource) -> Iterator[RequestRows]:
    spans = list(read_spans(source))
    if any(map(is_call, spans)) and all(span.name != SPAN_NAME for span in spans):
        yield rows_from_agents(source, spans)
    else:
        yield rows_from_spans(source, _table(source, spans))


def _known(head: FileHead) -> bool:
    jaeger = head.has("data", "spans", "operationName")
    return head.kind == "json" and (head.has("resourceSpans") or jaeger)


SPANS = TraceFormat(
    "otel",
    "OpenTelemetry spans of vLLM or of agents, OTLP JSON or Jaeger's export",
    _known,
    _rows,
    table=read_request_table,
)
