"""What a format is, and the beginning of a file by which it is known."""

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
    """The beginning of a file: of what kind it is, and the columns or keys that it names."""

    path: Path
    kind: Literal["folder", "tar", "parquet", "csv", "json", "yaml", "text", "binary"]
    names: frozenset[str]

    def has(self, *names: str) -> bool:
        """Whether the file has all these columns or keys; upper and lower case are the same."""
        return {name.casefold() for name in names} <= self.names


@dataclass(frozen=True)
class MeasuredLatencies:
    """What a request took, in ms; NaN what was not measured. With ``queue_ms`` TTFT and E2E count
    from when the engine core had it, else from when the client sent it."""

    ttft_ms: float
    tpot_ms: float
    e2e_ms: float
    queue_ms: float | None


@dataclass(frozen=True)
class TraceFormat:
    """A kind of trace: how it is known by its beginning, and how its rows are read.

    ``measured`` reads what a request took from its record, where the format says that; it raises
    ValueError as ``column: what would be right; found …``. A format whose records are not lines has
    a ``table`` of all of them in its place (see ``read_measured``).
    """

    name: str
    what: str
    known: Callable[[FileHead], bool]
    rows: Callable[[TraceSource], Iterator[RequestRows]]
    measured: Callable[[dict[str, Any]], MeasuredLatencies] | None = None
    table: Callable[[TraceSource], pd.DataFrame] | None = None
