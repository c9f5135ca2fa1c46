"""Reader of vLLM's OpenTelemetry spans ``llm_request``, as OTLP JSON or a Jaeger export.

There is one span per finished request. OTLP JSON is one object, or one object per line as the
collector's file exporter writes it. A Jaeger export is the JSON file downloaded from its UI
(``{"data": [{"spans": [...]}]}``). A span starts when the API server receives the request. Its
attributes are lengths (``gen_ai.usage.*``) and times in s (``gen_ai.latency.*``); ``time_in_queue``
ends when the request is first scheduled (vllm/v1/engine/output_processor.py ``do_tracing``, 0.11 to
0.33). Other spans are skipped.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from simkv.workload.column_values import MAX_SHOWN_CHARACTERS, describe_found
from simkv.workload.formats.trace_format import FileHead, TraceFormat
from simkv.workload.request_columns import RequestRows
from simkv.workload.trace_source import TraceSource, select_served
from simkv.workload.workload_base import MAX_TOKEN_COUNT

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
_NUMBERS = ("doubleValue", "intValue", "stringValue", "boolValue")


def _documents(source: TraceSource) -> Iterator[tuple[int, Any]]:
    """Yield the JSON values of a file with their line numbers: one per line, or one for the whole
    file.
    """
    with source.text() as lines:
        begun: list[str] = []
        for start, batch in source.batches(lines):
            for line, text in enumerate(batch, start):
                if begun or not text.strip():
                    begun += [text] if begun else []
                    continue
                try:
                    yield line, json.loads(text)
                except (ValueError, RecursionError) as error:
                    if line > 1:
                        source.bad(
                            line,
                            "row",
                            f"should be JSON; found {str(error)[:MAX_SHOWN_CHARACTERS]}",
                        )
                    else:
                        begun = [text]
    if begun:
        try:
            yield 1, json.loads("".join(begun))
        except (ValueError, RecursionError) as error:
            raise source.error(
                f"should be JSON; found {str(error)[:MAX_SHOWN_CHARACTERS]}"
            ) from error


def _items(value: Any, *path: str) -> Iterator[dict[str, Any]]:
    """Yield the objects at a path of keys through nested lists."""
    if not path:
        if isinstance(value, dict):
            yield value
        return
    inner = value.get(path[0]) if isinstance(value, dict) else None
    for item in inner if isinstance(inner, list) else ():
        yield from _items(item, *path[1:])


def _spans(document: Any) -> Iterator[tuple[float, dict[str, Any]]]:
    """Yield the start (s on a wall clock) and the attributes of each request span."""
    for part in document if isinstance(document, list) else [document]:
        for scopes in ("scopeSpans", "instrumentationLibrarySpans"):
            for span in _items(part, "resourceSpans", scopes, "spans"):
                if span.get("name") == SPAN_NAME:
                    start = _float(span.get("startTimeUnixNano")) / 1e9
                    yield start, {str(a.get("key")): _value(a) for a in _items(span, "attributes")}
        for span in _items(part, "data", "spans"):
            if span.get("operationName") == SPAN_NAME:
                start = _float(span.get("startTime")) / 1e6
                yield start, {str(tag.get("key")): tag.get("value") for tag in _items(span, "tags")}


def _float(value: Any) -> float:
    """Return a number, or NaN if ``value`` is not a number."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return np.nan


def _value(attribute: dict[str, Any]) -> Any:
    value = attribute.get("value")
    if not isinstance(value, dict):
        return value
    return next((value[kind] for kind in _NUMBERS if kind in value), None)


def _number(attributes: dict[str, Any], *names: str) -> float:
    """Return the first attribute that is present. Raises ValueError if it is not a number of at
    least 0.
    """
    value = next((attributes[name] for name in names if name in attributes), None)
    number = _float(value)
    if not 0 <= number <= MAX_TOKEN_COUNT:
        what = "missing" if value is None else describe_found(value)
        raise ValueError(f"{names[0]}: should be a number from 0 to {MAX_TOKEN_COUNT:,}; {what}")
    return number


def _record(start: float, attributes: dict[str, Any]) -> dict[str, Any]:
    """Return a span as a row of numbers. Raises ValueError with the text ``column: reason``."""
    if not np.isfinite(start):
        raise ValueError("start: should be a time since 1970; missing")
    row: dict[str, Any] = {"start_s": start, "request": str(attributes.get("gen_ai.request.id"))}
    for name, keys in _LENGTHS.items():
        row[name] = int(_number(attributes, *(_USAGE + key for key in keys)))
    for name, key in _TIMES.items():
        optional = name in ("prefill", "decode")
        there = _LATENCY + key in attributes
        row[name] = _number(attributes, _LATENCY + key) if there or not optional else np.nan
    asked = "gen_ai.request.max_tokens"
    row["max_tokens"] = int(_number(attributes, asked)) if attributes.get(asked) else 0
    return row


def read_request_table(source: TraceSource) -> pd.DataFrame:
    """Return one row per request in order of arrival (see ``read_measured_latencies``)."""
    import pandas as pd

    rows = []
    for line, document in _documents(source):
        for start, attributes in _spans(document):
            source.tally.rows += 1
            try:
                rows.append(_record(start, attributes) | {"line": line})
            except ValueError as error:
                column, _, what = str(error).partition(": ")
                source.bad(line, column, what)
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
    """Return the answered requests of a table from ``read_request_table``."""
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
    yield rows_from_spans(source, read_request_table(source))


def _known(head: FileHead) -> bool:
    jaeger = head.has("data", "spans", "operationName")
    return head.kind == "json" and (head.has("resourceSpans") or jaeger)


SPANS = TraceFormat(
    "otel",
    "vLLM's OpenTelemetry spans, OTLP JSON or Jaeger's export",
    _known,
    _rows,
    table=read_request_table,
)
