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
    """Beginning of a file: its kind, and its column names or keys.

    ``names`` are in lower case. ``columns`` are the names in a CSV header, as written.
    """

    path: Path
    kind: Literal["folder", "tar", "parquet", "csv", "json", "yaml", "text", "binary"]
    names: frozenset[str]
    columns: tuple[str, ...] = ()

    def has(self, *names: str) -> bool:
        """Return whether the file has all of these columns or keys, ignoring case."""
        return {name.casefold() for name in names} <= self.names

    @property
    def is_empty(self) -> bool:
        """Whether the file contains no text."""
        return self.kind == "text" and self.names == {""}


@dataclass(frozen=True)
class MeasuredLatencies:
    """Measured latencies of a request in ms; NaN if not measured.

    TTFT and E2E count from the time at which the client sent the request. If ``queue_ms`` is given,
    they count from the arrival at the engine core.
    """

    ttft_ms: float
    tpot_ms: float
    e2e_ms: float
    queue_ms: float | None


@dataclass(frozen=True)
class TraceFormat:
    """A trace format.

    - ``known``: returns whether a file has the format.
    - ``rows``: yields the requests.
    - ``measured``: returns the latencies of a record, or raises ValueError if the record is
      invalid.
    - ``table``: returns all requests with latencies at once.
    """

    # The message of the error is ``column: expected; found …``. ``table`` is for formats whose
    # records are not lines (see ``read_measured_latencies``).

    name: str
    what: str
    known: Callable[[FileHead], bool]
    rows: Callable[[TraceSource], Iterator[RequestRows]]
    measured: Callable[[dict[str, Any]], MeasuredLatencies] | None = None
    table: Callable[[TraceSource], pd.DataFrame] | None = None
