"""Reader and writer of simkv traces as Parquet files with typed columns. Requires pyarrow.

The columns are the same as in the CSV format.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from simkv.core.errors import InputError
from simkv.workload.column_values import ColumnArray
from simkv.workload.csv_columns import CsvTable
from simkv.workload.formats.simkv_csv import (
    COLUMN_PARSERS,
    LENGTH_PARSERS,
    format_column,
    note_unknown,
    rows_from_table,
)
from simkv.workload.formats.trace_format import FileHead, TraceFormat
from simkv.workload.request_columns import RequestRows
from simkv.workload.trace_source import TraceSource

#: Number of rows per row group.
ROW_GROUP = 1 << 16
_KINDS = {
    "arrival": "float64",
    "timeout": "float64",
    "think_time": "float64",
    "tool_time": "float64",
    "waits_for": "string",
    "ignore_eos": "bool",
    "has_images": "bool",
    "lora": "string",
    "client": "string",
    "acceptance": "float64",
    "session": "string",
    "prefix": "string",
}


def _pyarrow() -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise InputError(
            "Parquet requires pyarrow, which is not installed: pip install 'simkv[parquet]', "
            "or use CSV"
        ) from error
    return pyarrow


def _rows(source: TraceSource) -> Iterator[RequestRows]:
    pyarrow = _pyarrow()
    try:
        with pyarrow.parquet.ParquetFile(source.path) as file:
            names = file.schema_arrow.names
            missing = [name for name in LENGTH_PARSERS if name not in names]
            if missing:
                raise source.error(f"missing {', '.join(missing)}; found {', '.join(names)}")
            for name in COLUMN_PARSERS:
                if names.count(name) > 1:
                    raise source.error(f"{names.count(name)} columns are named {name}")
            note_unknown(source, names)
            wanted = [name for name in COLUMN_PARSERS if name in names]
            for batch in file.iter_batches(ROW_GROUP, columns=wanted):
                yield _of_batch(source, batch, wanted)
    except (pyarrow.ArrowException, OSError) as error:
        raise source.error(f"should be a Parquet file; found {error}") from error


def _of_batch(source: TraceSource, batch: Any, names: Sequence[str]) -> RequestRows:
    """Return the rows of a Parquet batch, validated like the rows of a CSV file."""
    first, count = source.tally.rows, batch.num_rows
    source.tally.rows += count
    columns: dict[str, ColumnArray] = {}
    good = np.ones(count, np.bool_)
    texts = {name: _texts(batch.column(name)) for name in names}
    for name in names:
        try:
            columns[name] = COLUMN_PARSERS[name](texts[name])
        except ValueError:
            for row, text in enumerate(texts[name]):
                good[row] &= _is_good(source, first + row, name, text, bool(good[row]))
    left = np.flatnonzero(good)
    if len(left) < count:
        columns = {name: COLUMN_PARSERS[name]([texts[name][row] for row in left]) for name in names}
    return rows_from_table(source, CsvTable(columns, (first + left + 1).tolist(), first + left))


def _texts(column: Any) -> list[str]:
    return ["" if value is None else str(value) for value in column.to_pylist()]


def _is_good(source: TraceSource, row: int, name: str, text: str, tell: bool) -> bool:
    """Return whether a value is valid."""
    # In error messages, the row number, counted from 1, takes the place of the line number.
    try:
        COLUMN_PARSERS[name]([text])
    except ValueError as error:
        if tell:
            source.bad(row + 1, name, str(error))
        return False
    return True


def write_parquet(
    path: Path, parts: Iterable[RequestRows], columns: Sequence[str], source: TraceSource
) -> int:
    """Write a trace as Parquet and return the number of rows.

    The parameters are as in ``write_file``.
    """
    pyarrow = _pyarrow()
    schema = pyarrow.schema([(name, _KINDS.get(name, "int64")) for name in columns])
    count = 0
    with pyarrow.parquet.ParquetWriter(path, schema, compression="zstd") as writer:
        for rows in _larger(parts):
            arrays = [_array(pyarrow, rows, name, source) for name in columns]
            writer.write_table(pyarrow.Table.from_arrays(arrays, schema=schema))
            count += len(rows)
    return count


def _larger(parts: Iterable[RequestRows]) -> Iterator[RequestRows]:
    """Combine batches until each is large enough for a row group."""
    kept: list[RequestRows] = []
    for rows in parts:
        kept.append(rows)
        if sum(map(len, kept)) >= ROW_GROUP:
            yield RequestRows.concat(kept)
            kept = []
    if kept:
        yield RequestRows.concat(kept)


def _array(pyarrow: Any, rows: RequestRows, name: str, source: TraceSource) -> Any:
    if _KINDS.get(name) == "string":
        return pyarrow.array([text or None for text in format_column(rows, name, source)], "string")
    values = rows.column(name)
    if values.dtype == np.float64:
        return pyarrow.array(values, mask=np.isnan(values))
    return pyarrow.array(values, mask=values == 0 if name == "max_tokens" else None)


def _is_parquet(head: FileHead) -> bool:
    return head.kind == "parquet"


PARQUET = TraceFormat("simkv-parquet", "simkv's own traces (Parquet)", _is_parquet, _rows)
