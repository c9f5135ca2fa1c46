"""Spans of OpenTelemetry, read from OTLP JSON or a Jaeger export.

OTLP JSON is one object, or one object per line, as written by the file exporter of the
OpenTelemetry Collector. A Jaeger export is the JSON file downloaded from its UI (``{"data":
[{"spans": [...]}]}``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from simkv.workload.column_values import describe_found
from simkv.workload.json_records import json_documents
from simkv.workload.trace_source import TraceSource
from simkv.workload.workload_base import MAX_TOKEN_COUNT

_NUMBERS = ("doubleValue", "intValue", "stringValue", "boolValue")


@dataclass(frozen=True, slots=True)
class Span:
    """A span of OpenTelemetry.

    - ``line``: line in the file.
    - ``parent``: id of the parent span in the same trace, or empty.
    - ``start``, ``end``: seconds since 1970; NaN if missing.
    """

    line: int
    trace: str
    id: str
    parent: str
    name: str
    start: float
    end: float
    attributes: dict[str, Any]


def read_spans(source: TraceSource) -> Iterator[Span]:
    """Yield the spans of a file."""
    for line, document in json_documents(source):
        for part in document if isinstance(document, list) else [document]:
            for scopes in ("scopeSpans", "instrumentationLibrarySpans"):
                for span in _items(part, "resourceSpans", scopes, "spans"):
                    yield _otlp(line, span)
            for span in _items(part, "data", "spans"):
                yield _jaeger(line, span)


def read_number(attributes: dict[str, Any], *names: str) -> float:
    """Return the value of the first attribute that is present.

    Raises ValueError if the value is not a non-negative number.
    """
    value = next((attributes[name] for name in names if name in attributes), None)
    number = _float(value)
    if not 0 <= number <= MAX_TOKEN_COUNT:
        what = "missing" if value is None else describe_found(value)
        raise ValueError(f"{names[0]}: should be a number from 0 to {MAX_TOKEN_COUNT:,}; {what}")
    return number


def _otlp(line: int, span: dict[str, Any]) -> Span:
    start, end = (_float(span.get(f"{name}TimeUnixNano")) / 1e9 for name in ("start", "end"))
    trace, own, parent = (
        str(span.get(name) or "") for name in ("traceId", "spanId", "parentSpanId")
    )
    attributes = {str(one.get("key")): _value(one) for one in _items(span, "attributes")}
    return Span(line, trace, own, parent, str(span.get("name")), start, end, attributes)


def _jaeger(line: int, span: dict[str, Any]) -> Span:
    start = _float(span.get("startTime")) / 1e6
    end = start + _float(span.get("duration")) / 1e6
    parents = (one for one in _items(span, "references") if one.get("refType") == "CHILD_OF")
    parent = str(next((one.get("spanID") for one in parents), None) or "")
    trace, own = (str(span.get(name) or "") for name in ("traceID", "spanID"))
    tags = {str(tag.get("key")): tag.get("value") for tag in _items(span, "tags")}
    return Span(line, trace, own, parent, str(span.get("operationName")), start, end, tags)


def _items(value: Any, *path: str) -> Iterator[dict[str, Any]]:
    """Yield the objects at a path of keys, for all elements of lists on the path."""
    if not path:
        if isinstance(value, dict):
            yield value
        return
    inner = value.get(path[0]) if isinstance(value, dict) else None
    for item in inner if isinstance(inner, list) else ():
        yield from _items(item, *path[1:])


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
