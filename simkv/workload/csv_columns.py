"""Read the columns of a CSV file and report invalid rows."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from simkv.workload.column_values import ColumnArray, Parser
from simkv.workload.request_columns import Ints
from simkv.workload.trace_source import TraceSource

#: Maximum number of characters in a field; the field with the pieces of a prompt can be long.
MAX_FIELD_CHARACTERS = 1 << 26


@dataclass(frozen=True)
class CsvTable:
    """Rows of a CSV file as columns by name.

    - ``lines``: line number of each row.
    - ``numbers``: index of each row among the rows of the file.
    - ``others``: names of unused columns.
    """

    columns: dict[str, ColumnArray]
    lines: Sequence[int]
    numbers: Ints
    others: Sequence[str] = ()

    def __getitem__(self, name: str) -> ColumnArray:
        return self.columns[name]


def open_csv(
    source: TraceSource,
    lines: Iterator[str],
    needed: Mapping[str, Parser],
    also: Mapping[str, Parser] | None = None,
    quoted: bool = False,
    line: int = 1,
) -> Iterator[CsvTable]:
    """Yield the columns ``needed`` of a CSV file, and the existing columns among ``also``.

    ``line`` is the number of the next line. Raises InputError if a needed column is missing or a
    column is duplicated.
    """
    # Column names are case-insensitive.
    line, header = read_header(lines, line)
    wanted = {**needed, **(also or {})}
    known = {name.casefold(): name for name in wanted}
    header = [known.get(name.casefold(), name) for name in header]
    for name in wanted:
        if header.count(name) > 1:
            raise source.error(
                f"header: {header.count(name)} columns have the name {name}; expected one", line - 1
            )
    missing = [name for name in needed if name not in header]
    if missing:
        raise source.error(
            f"header: missing {', '.join(missing)}; found {', '.join(header) or 'nothing'}",
            line - 1,
        )
    yield from csv_tables(source, wanted, lines, line, header, quoted)


def read_header(lines: Iterable[str], number: int = 1) -> tuple[int, list[str]]:
    """Return the number of the line after the header, and the CSV fields of the header.

    The header is the first non-empty line.
    """
    for line in lines:
        number += 1
        if line.strip():
            return number, [name.strip() for name in next(csv.reader([line]))]
    return number, []


def csv_tables(
    source: TraceSource,
    wanted: dict[str, Parser],
    lines: Iterator[str],
    line: int,
    header: Sequence[str],
    quoted: bool = False,
) -> Iterator[CsvTable]:
    """Yield the columns ``wanted`` of the rows in ``lines``, which follow the header of a CSV file.

    ``line`` is the number of the first of these lines. ``quoted`` allows quoted fields with line
    ends. Invalid rows are reported to ``source``.
    """
    # Columns that the header does not contain are left out.
    csv.field_size_limit(MAX_FIELD_CHARACTERS)
    places = {name: header.index(name) for name in wanted if name in header}
    others = [name for name in header if name not in places]
    for start, batch in source.batches(lines, line, quoted):
        first = source.tally.rows
        columns = _all_rows(wanted, places, len(header), batch)
        if columns is not None:
            source.tally.rows += len(batch)
            at: Sequence[int] = range(start, start + len(batch))
            numbers = np.arange(first, first + len(batch))
        else:
            rows = _lines_as_rows(source, start, batch, quoted)
            good = [row for row in rows if _is_good(source, wanted, places, len(header), row)]
            at = [row.line for row in good]
            numbers = np.array([row.number for row in good], np.int64)
            columns = {
                name: parse([row.fields[places[name]] for row in good])
                for name, parse in wanted.items()
                if name in places
            }
        yield CsvTable(columns, at, numbers, others)


def _all_rows(
    wanted: dict[str, Parser], places: dict[str, int], width: int, batch: list[str]
) -> dict[str, ColumnArray] | None:
    """Parse the columns of all rows at once. Return None if any row must be checked separately."""
    try:
        fields = list(zip(*csv.reader(batch), strict=True))
        if len(fields) != width or len(fields[0]) != len(batch):
            return None
        return {name: wanted[name](fields[place]) for name, place in places.items()}
    except (ValueError, csv.Error):
        return None


@dataclass(frozen=True, slots=True)
class _Row:
    line: int
    number: int
    fields: list[str]


def _lines_as_rows(
    source: TraceSource, start: int, batch: list[str], quoted: bool
) -> Iterator[_Row]:
    """Yield the non-empty rows of a batch of lines."""
    texts: list[tuple[int, Iterator[str]]] = [
        (start + index, iter([text])) for index, text in enumerate(batch)
    ]
    if quoted:
        texts = [(start, iter(batch))]
    for line, text in texts:
        reader = csv.reader(text)
        while True:
            at = line + reader.line_num
            try:
                fields = next(reader)
            except StopIteration:
                break
            except csv.Error as error:
                source.tally.rows += 1
                source.bad(at, "row", f"should be comma-separated fields; found {error}")
                continue
            if len(fields) > 1 or any(field.strip() for field in fields):
                source.tally.rows += 1
                yield _Row(at, source.tally.rows - 1, fields)


def _is_good(
    source: TraceSource, wanted: dict[str, Parser], places: dict[str, int], width: int, row: _Row
) -> bool:
    """Return whether a row is valid. Report an invalid row to ``source``."""
    if len(row.fields) != width:
        source.bad(row.line, "row", f"should have {width} fields; found {len(row.fields)}")
        return False
    for name, place in places.items():
        try:
            wanted[name]([row.fields[place]])
        except ValueError as error:
            source.bad(row.line, name, str(error))
            return False
    return True
