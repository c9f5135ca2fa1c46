"""Convert traces of any known format to simkv's own format."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO

from simkv.core.atomic_files import atomic_file
from simkv.workload.formats.simkv_csv import used_columns, write_csv, write_file
from simkv.workload.formats.simkv_parquet import write_parquet
from simkv.workload.request_columns import RequestRows, has_row_references, is_sorted
from simkv.workload.trace_reader import TraceReader, sort_by_arrival


class _Again(Exception):
    """Raised if the conversion must start again."""

    # The trace has more columns than expected or must be read as a whole.

    def __init__(self, columns: Sequence[str], whole: bool) -> None:
        super().__init__()
        self.columns, self.whole = columns, whole


def convert_trace(reader: TraceReader, out: Path) -> int:
    """Write the requests from ``reader`` to ``out`` in order of arrival, and return their number.

    Raises InputError if the trace is empty or unreadable, or if the file cannot be written.
    """
    # A few thousand rows are processed at a time. Only a trace that is unordered, or whose prompts
    # refer to other rows, is loaded into memory as a whole. The file is written completely or not
    # at all.
    with atomic_file(out) as new:

        def to_file(parts: Iterable[RequestRows], columns: Sequence[str]) -> int:
            write = write_parquet if out.suffix == ".parquet" else write_file
            return write(new, parts, columns, reader.source)

        return _write(reader, to_file)


def _write(
    reader: TraceReader, target: Callable[[Iterable[RequestRows], Sequence[str]], int]
) -> int:
    """Write the trace with as few columns as possible."""
    # The conversion restarts if further columns are needed.
    columns: Sequence[str] = ()
    whole = False
    while True:
        parts = iter([sort_by_arrival(list(reader), reader.source)] if whole else reader)
        first = next(parts, None)
        if first is None or not len(first):
            raise reader.no_rows_error()
        columns = used_columns(first, columns)
        try:
            return target(_checked(first, parts, columns, whole), columns)
        except _Again as again:
            columns, whole = again.columns, whole or again.whole


def _checked(
    first: RequestRows, parts: Iterator[RequestRows], columns: Sequence[str], whole: bool
) -> Iterator[RequestRows]:
    """Yield the rows. Raise ``_Again`` if they are unordered or have additional columns."""
    last = 0.0
    rows: RequestRows | None = first
    while rows is not None:
        used = used_columns(rows, columns)
        out_of_order = rows.arrival[0] < last or not (
            is_sorted(rows.arrival) or "arrival" not in columns
        )
        refers = has_row_references(rows)
        if len(used) > len(columns) or (not whole and (out_of_order or refers)):
            raise _Again(used, out_of_order or refers)
        last = float(rows.arrival[-1])
        yield rows
        rows = next(parts, None)


def write_csv_rows(parts: Sequence[RequestRows], reader: TraceReader, to: IO[str]) -> None:
    """Write rows as CSV to an open file."""
    rows = sort_by_arrival(parts, reader.source)
    write_csv(to, [rows], used_columns(rows), reader.source)
