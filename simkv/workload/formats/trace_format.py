"""Definition of a trace format, and the part of a file that is read to detect the format."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from simkv.workload.request_columns import RequestRows
from simkv.workload.trace_source import TraceSource

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class FileHead:
    """Beginning of a file: its kind, and the column names or keys found in it."""

    path: Path
    kind: Literal["folder", "tar", "parquet", "csv", "json", "yaml", "text", "binary"]
    names: frozenset[str]

    def has(self, *names: str) -> bool:
        """Return whether the file has all of these columns or keys. Names are case-insensitive."""
        return {name.casefold() for name in names} <= self.names


@dataclass(frozen=True)
class MeasuredLatencies:
    """Measured latencies of a request in ms; NaN if not measured.

    If ``queue_ms`` is given, TTFT and E2E count from the arrival at the engine core; otherwise they
    count from the time at which the client sent the request.
    """

    ttft_ms: float
    tpot_ms: float
    e2e_ms: float
    queue_ms: float | None


@dataclass(frozen=True)
class TraceFormat:
    """A trace format: how to detect it and how to read it.

    If the format has latencies, ``measured`` reads the latencies of a request from its record; for
    an invalid record, it raises ValueError with ``column: expected; found …``. If the records of a
    format are not lines, the format has ``table`` instead, which returns all requests at once (see
    ``read_measured_latencies``).
    """

    name: str
    what: str
    known: Callable[[FileHead], bool]
    rows: Callable[[TraceSource], Iterator[RequestRows]]
    measured: Callable[[dict[str, Any]], MeasuredLatencies] | None = None
    table: Callable[[TraceSource], pd.DataFrame] | None = None
