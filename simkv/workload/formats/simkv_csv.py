"""Reader and writer of simkv's own CSV traces, plain or gzip-compressed, without loss.

``prompt_tokens`` and ``output_tokens`` are required. Optional columns: ``arrival`` (s, from 0; a
trace without it has lengths only), ``max_tokens``, ``priority`` (smaller is more urgent),
``timeout`` (s), ``ignore_eos`` and ``has_images`` (0 or 1), ``lora`` (adapter name), ``client``
(name of the client), ``acceptance`` (probability from 0 to 1 that a draft token is accepted if all
earlier ones were accepted), ``session``, ``think_time`` (seconds from the end of the session's
previous request until this request arrives; if empty, the request arrives at its ``arrival``),
``tool_time`` (seconds in addition to the think time), ``waits_for`` (rows whose answers the request
waits for, in place of the session's previous request: numbers of earlier rows, separated by blanks;
the first row is 0), and ``prefix``. ``prefix`` describes the beginning of the prompt as pieces
``stream:end`` or ``stream:start-end``, separated by blanks.

A stream is a sequence of tokens; the same position in the same stream is always the same token. The
stream ``h<number>`` is a block identified by its hash. ``o<row>`` contains the output of a row, and
``u<row>`` the prompt tokens that only this row has (the first row is 0). Any other name is an
independent stream; in a name, all characters except letters, digits and ``_.-~`` are written as
%XX. Tokens after the last piece are unique to the prompt.
"""

from __future__ import annotations

import gzip
import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from operator import attrgetter
from pathlib import Path
from typing import IO, Any, cast
from urllib.parse import quote, unquote

import numpy as np

from simkv.core.errors import spelling_hint
from simkv.workload.column_values import (
    ColumnArray,
    Parser,
    describe_found,
    make_column_parser,
    parse_time,
    parse_times,
    parse_whole_number,
    parse_whole_numbers,
)
from simkv.workload.csv_columns import CsvTable, open_csv
from simkv.workload.formats.trace_format import FileHead, TraceFormat
from simkv.workload.request_columns import (
    COLUMN_DEFAULTS,
    Flags,
    NameTable,
    PromptPieces,
    RequestRows,
    format_pieces,
    parse_pieces,
)
from simkv.workload.trace_source import TraceSource

#: Columns with names, which are stored as numbers, and the table in the source that maps the names.
NAME_COLUMNS: dict[str, Callable[[TraceSource], NameTable]] = {
    "lora": attrgetter("loras"),
    "client": attrgetter("clients"),
    "session": attrgetter("sessions"),
}
#: Characters of a session name that are not percent-encoded.
_PLAIN = " !#$&'()*+-./:;<=>?@[]^_`{|}~"


def _from_one(text: str) -> int:
    if (value := parse_whole_number(text)) < 1:
        raise ValueError(f"should be a whole number of at least 1; {describe_found(text)}")
    return value


def _tokens(texts: Sequence[str]) -> ColumnArray:
    values = parse_whole_numbers(texts)
    if len(values) and values.min() < 1:
        return np.array([_from_one(text) for text in texts], np.int64)
    return values


def _empty_or(parse: Callable[[str], Any], default: Any) -> Callable[[str], Any]:
    return lambda text: parse(text) if text.strip() else default


def _integer(text: str) -> int:
    try:
        value = int(text)
        if abs(value) < 1 << 53:
            return value
    except ValueError:
        pass
    raise ValueError(f"should be a whole number; {describe_found(text)}")


def _flag(text: str) -> bool:
    try:
        return {"0": False, "1": True, "false": False, "true": True}[text.strip().casefold()]
    except KeyError:
        raise ValueError(f"should be 0 or 1; {describe_found(text)}") from None


def _patience(text: str) -> float:
    if (value := parse_time(text)) <= 0:
        raise ValueError(f"should be a number greater than 0; {describe_found(text)}")
    return value


def _share(text: str) -> float:
    if (value := parse_time(text)) > 1:
        raise ValueError(f"should be a number from 0 to 1; {describe_found(text)}")
    return value


def _row_numbers(text: str) -> tuple[int, ...]:
    try:
        rows = tuple(map(int, text.split()))
        if min(rows, default=0) >= 0:
            return rows
    except ValueError:
        pass
    raise ValueError(f"should be numbers of rows separated by blanks; {describe_found(text)}")


def _check_prefix(text: str) -> str:
    parse_pieces(text, NameTable())
    return text


LENGTH_PARSERS: dict[str, Parser] = {"prompt_tokens": _tokens, "output_tokens": _tokens}
COLUMN_PARSERS: dict[str, Parser] = {
    "arrival": parse_times,
    **LENGTH_PARSERS,
    "max_tokens": make_column_parser(_empty_or(_from_one, 0), np.int64),
    "priority": make_column_parser(_empty_or(_integer, 0), np.int64),
    "timeout": make_column_parser(_empty_or(_patience, np.nan), np.float64),
    "ignore_eos": make_column_parser(_empty_or(_flag, False), np.bool_),
    "has_images": make_column_parser(_empty_or(_flag, False), np.bool_),
    "lora": make_column_parser(str),
    "client": make_column_parser(str),
    "acceptance": make_column_parser(_empty_or(_share, np.nan), np.float64),
    "session": make_column_parser(str),
    "think_time": make_column_parser(_empty_or(parse_time, np.nan), np.float64),
    "tool_time": make_column_parser(_empty_or(parse_time, np.nan), np.float64),
    "waits_for": make_column_parser(_row_numbers),
    "prefix": make_column_parser(_check_prefix),
}
#: Units of times since 1970 (for times after 1973): name, smallest value and units per second.
_EPOCH_UNITS = (
    ("nanoseconds", 1e17, 1e9),
    ("microseconds", 1e14, 1e6),
    ("milliseconds", 1e11, 1e3),
)
#: Columns with row ids; they are ignored because simkv numbers the rows itself.
_IGNORED = {"id", "request_id"}


def _rows(source: TraceSource) -> Iterator[RequestRows]:
    with source.text() as lines:
        for table in open_csv(source, lines, LENGTH_PARSERS, COLUMN_PARSERS):
            note_unknown(source, table.others)
            yield rows_from_table(source, table)


def note_unknown(source: TraceSource, names: Iterable[str]) -> None:
    """Add a note about unknown columns, which may be misspelled."""
    unknown = [name for name in names if name not in _IGNORED and name not in COLUMN_PARSERS]
    if unknown and not any("unknown columns" in note for note in source.tally.notes):
        listed = ", ".join(f"{name!r}{spelling_hint(name, COLUMN_PARSERS)}" for name in unknown)
        source.tally.notes.append(f"ignored unknown columns: {listed}")


def _in_seconds(source: TraceSource, arrivals: ColumnArray) -> ColumnArray:
    """Return arrivals in seconds."""
    # Large numbers are times since 1970; whether they are in ms, us or ns is inferred from their
    # size.
    least = arrivals.min() if len(arrivals) else 0.0
    for unit, begin, per_second in _EPOCH_UNITS:
        if least >= begin:
            note = f"arrival: read as {unit} since 1970"
            if note not in source.tally.notes:
                source.tally.notes.append(note)
            return np.asarray(arrivals / per_second)
    return arrivals


def rows_from_table(source: TraceSource, table: CsvTable) -> RequestRows:
    """Return the rows of a table whose columns ``COLUMN_PARSERS`` has parsed."""
    columns: dict[str, Any] = dict(table.columns)
    if "arrival" in columns:
        columns["arrival"] = _in_seconds(source, columns["arrival"])
    named = {name: columns.pop(name, None) for name in NAME_COLUMNS}
    prefixes = columns.pop("prefix", None)
    columns.setdefault("arrival", np.full(len(table.lines), np.nan))
    rows = RequestRows(**columns, number=table.numbers)
    for column, texts in named.items():
        if texts is not None:
            number = NAME_COLUMNS[column](source).number
            numbers = [number(unquote(name)) if name else -1 for name in texts]
            setattr(rows, column, np.array(numbers, np.int64))
    fits = _waits_for_earlier(source, table)
    if prefixes is None:
        return rows.where(fits)
    pieces = [parse_pieces(text, source.streams) for text in prefixes]
    rows.pieces = PromptPieces.of(pieces)
    totals = np.array([sum(end - start for *_, start, end in row) for row in pieces], np.int64)
    short = totals <= rows.prompt_tokens
    for row in np.flatnonzero(~short).tolist():
        source.bad(
            table.lines[row],
            "prefix",
            f"should be at most the number of prompt tokens; found {totals[row]} of "
            f"{rows.prompt_tokens[row]}",
        )
    return rows.where(fits & short)


def _waits_for_earlier(source: TraceSource, table: CsvTable) -> Flags:
    """Return a mask of the rows that wait only for earlier rows.

    Report the other rows as invalid.
    """
    fine = np.ones(len(table.lines), np.bool_)
    for row, before in enumerate(table.columns.get("waits_for", ())):
        number = int(table.numbers[row])
        if before and max(before) >= number:
            fine[row] = False
            what = f"should be numbers of earlier rows, below {number}; found {max(before)}"
            source.bad(table.lines[row], "waits_for", what)
    return fine


def _known(head: FileHead) -> bool:
    ours = head.has("arrival") or head.names <= {*COLUMN_PARSERS}
    return head.kind == "csv" and head.has(*LENGTH_PARSERS) and ours


def find_missing_columns(head: FileHead) -> list[str]:
    """Return the missing columns of a file that resembles a simkv trace."""
    # The result is empty for all other files.
    like_ours = head.kind == "csv" and head.names & {"arrival", *LENGTH_PARSERS}
    lacking = [name for name in ("arrival", *LENGTH_PARSERS) if name not in head.names]
    return lacking if like_ours else []


SIMKV = TraceFormat("simkv", "simkv's own traces (CSV)", _known, _rows)


def used_columns(rows: RequestRows, already: Sequence[str] = ()) -> list[str]:
    """Return the names of the columns that a file with these rows needs.

    The lengths and the columns in ``already`` are always included.
    """
    # The names are in the order of ``COLUMN_PARSERS``. A column is needed if any value differs from
    # the default.
    return [
        name
        for name in COLUMN_PARSERS
        if name in already or name in LENGTH_PARSERS or _is_used(rows, name)
    ]


def _is_used(rows: RequestRows, name: str) -> bool:
    if name == "prefix":
        return rows.pieces is not None and len(rows.pieces.value) > 0
    column = getattr(rows, name)
    if column is None:
        return False
    if column.dtype == np.float64:
        return not np.isnan(column).all()
    if column.dtype == object:
        return any(column)
    return bool((column != COLUMN_DEFAULTS[name]).any())


def write_file(
    path: Path, parts: Iterable[RequestRows], columns: Sequence[str], source: TraceSource
) -> int:
    """Write a trace as CSV and return the number of rows.

    The file is gzip-compressed if ``path`` ends in .gz. ``source`` has the names of sessions and
    streams.
    """
    with ExitStack() as stack:
        raw: IO[bytes] = stack.enter_context(path.open("wb"))
        if path.name.endswith(".gz"):
            packed = gzip.GzipFile("", "wb", compresslevel=6, fileobj=raw, mtime=0)
            raw = cast(IO[bytes], stack.enter_context(packed))
        text = stack.enter_context(io.TextIOWrapper(raw, encoding="utf-8", newline=""))
        return write_csv(text, parts, columns, source)


def write_csv(
    text: IO[str], parts: Iterable[RequestRows], columns: Sequence[str], source: TraceSource
) -> int:
    """Write rows as CSV with a header and return the number of rows."""
    text.write(",".join(columns) + "\n")
    count = 0
    for rows in parts:
        fields = [format_column(rows, name, source) for name in columns]
        text.writelines(",".join(row) + "\n" for row in zip(*fields, strict=True))
        count += len(rows)
    return count


def format_column(rows: RequestRows, name: str, source: TraceSource) -> Iterable[str]:
    """Return a column as text. Missing values are empty."""
    if name == "prefix":
        names = source.streams.names
        return [format_pieces(row, names) for row in rows.column("pieces").by_row()]
    values = rows.column(name)
    if name in NAME_COLUMNS:
        plain = [quote(one, safe=_PLAIN) for one in NAME_COLUMNS[name](source).names]
        return ["" if value < 0 else plain[value] for value in values.tolist()]
    if values.dtype == object:
        return [" ".join(map(str, rows)) for rows in values]
    if values.dtype == np.float64:
        return ["" if value != value else repr(value) for value in values.tolist()]
    if name == "max_tokens":
        return [str(value) if value else "" for value in values.tolist()]
    return map(str, values.astype(np.int64).tolist())
