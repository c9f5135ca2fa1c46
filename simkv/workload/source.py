"""A trace file as text with line numbers, plain or gzip'd, and what became of its rows."""

from __future__ import annotations

import csv
import gzip
import io
import json
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import numpy.typing as npt

from simkv.core.errors import InputError
from simkv.core.files import disk_errors
from simkv.workload.rows import Flags, Floats, Ints, Names, Rows

#: Rows that are handled at a time: enough for numpy, little enough for the processor's cache.
BATCH = 4096
#: A request with more tokens than this is a mistake.
MOST_TOKENS = 100_000_000
#: A field, as of a prompt's pieces, may be as long as this many characters.
MOST_CHARACTERS = 1 << 26
#: Of a message's examples.
SHOWN = 60

Column = npt.NDArray[Any]


@dataclass(frozen=True)
class Selection:
    """Which requests of a trace are taken, and at what speed.

    In this order: the ``duration`` seconds from ``start`` on the trace's clock; the ``sample``
    drawn with ``seed``, a fraction (a float up to 1.0) or a number of requests (an int); the first
    ``limit`` of what is left. Then ``start`` becomes time 0 and arrivals come ``rate_scale`` times
    as fast. ``seed`` is also that of a trace which is itself drawn. Bad rows are an error, or with
    ``skip_bad`` left out and counted.
    """

    start: float = 0.0
    duration: float | None = None
    rate_scale: float = 1.0
    limit: int | None = None
    sample: int | float | None = None
    seed: int = 0
    skip_bad: bool = False

    def __post_init__(self) -> None:
        checks = {
            "start": (np.isfinite(self.start) and self.start >= 0, "seconds from 0"),
            "duration": (self.duration is None or self.duration > 0, "seconds above 0"),
            "rate_scale": (np.isfinite(self.rate_scale) and self.rate_scale > 0, "above 0"),
            "limit": (self.limit is None or self.limit > 0, "a number of requests from 1"),
            "seed": (self.seed >= 0, "a whole number from 0"),
            "sample": (
                self.sample is None
                or (self.sample >= 1 if isinstance(self.sample, int) else 0 < self.sample <= 1),
                "a fraction like 0.1, at most 1.0, or a number of requests like 1000",
            ),
        }
        for name, (fine, right) in checks.items():
            if not fine:
                raise InputError(f"{name}: should be {right}; found {getattr(self, name)}")


@dataclass
class Tally:
    """How many rows were read, and how many were left out and why.

    ``failed`` rows are requests that came to nothing in the recorded system; ``bad`` rows cannot be
    read. ``first`` is the line of the first row left out for each reason. ``notes`` are what a
    reader of the trace must know.
    """

    rows: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    bad: Counter[str] = field(default_factory=Counter)
    first: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def left_out(self) -> int:
        return self.failed.total() + self.bad.total()

    def lines(self) -> list[str]:
        """What was left out and the notes, a sentence each."""
        told = []
        for kind, counts in (("bad rows", self.bad), ("failed requests", self.failed)):
            if counts:
                reasons = "; ".join(
                    f"{count:,} {reason} (first in line {self.first[reason]})"
                    for reason, count in counts.most_common()
                )
                told.append(f"{counts.total():,} of {self.rows:,} {kind} left out: {reasons}")
        return [*told, *self.notes]


class Source:
    """A trace that is being read: where it is, what is wanted of it, what was left out."""

    def __init__(
        self,
        path: Path,
        selection: Selection | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        self.path = path
        self.selection = selection or Selection()
        self.tally = Tally()
        self.streams = Names()
        self.sessions = Names()
        self.loras = Names()
        self.line = 0
        self._at: Callable[[], int] = lambda: 0
        self._progress = progress
        self._origin: int | float | None = None

    def bad(self, line: int, column: str, what: str) -> None:
        """A row that cannot be used: an error, or counted.

        ``what`` says what would be right and what was found, with "; found " between them.
        """
        if not self.selection.skip_bad:
            raise InputError(
                f"{self.path}:{line}: {column}: {what} "
                "(skip_bad, or --skip-bad, leaves out such rows and counts them)"
            )
        reason = f"{column}: {what.partition('; found ')[0]}"
        self.tally.bad[reason] += 1
        self.tally.first.setdefault(reason, line)

    def failed(self, reason: str, rows: Flags, lines: Sequence[int]) -> None:
        """Count the requests, marked in ``rows``, that came to nothing."""
        count = int(rows.sum())
        if count:
            self.tally.failed[reason] += count
            self.tally.first.setdefault(reason, lines[int(np.flatnonzero(rows)[0])])

    def since_first(self, times: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Times of a clock without a beginning, counted from the first row of the trace."""
        if self._origin is None and len(times):
            self._origin = times[0]
        return times if self._origin is None else times - self._origin

    def error(self, what: str, line: int | None = None) -> InputError:
        """The error that the file as a whole, or a line that all rest on, cannot be used."""
        return InputError(f"{self.path}{'' if line is None else f':{line}'}: {what}")

    @contextmanager
    def text(self, path: Path | None = None) -> Iterator[IO[str]]:
        """The file as text; bytes that are not UTF-8 stay and will fail where they matter.

        Raises InputError if it cannot be read, or compressed data end too early or are damaged.
        """
        path = path or self.path
        self.line = 0
        try:
            with open_binary(path) as raw:
                stream = unpacked(raw)
                with io.TextIOWrapper(
                    stream, encoding="utf-8-sig", errors="surrogateescape", newline=""
                ) as lines:
                    self._at = raw.tell
                    yield lines
        except EOFError as error:
            raise InputError(
                f"{path}: the gzip data end too early, after line {self.line} or later: the file "
                "is incomplete; get it again"
            ) from error
        except (zlib.error, gzip.BadGzipFile) as error:
            raise InputError(
                f"{path}: the gzip data are damaged, after line {self.line} or later; get it again"
            ) from error
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise InputError(f"{path}: cannot be read: {reason}") from error

    def batches(
        self, lines: Iterator[str], line: int = 1, quoted: bool = False
    ) -> Iterator[tuple[int, list[str]]]:
        """Lists of lines, each with the number of its first line, beginning with ``line``.

        With ``quoted`` a CSV field in quotes that goes over several lines stays in one list.
        """
        while batch := list(islice(lines, BATCH)):
            if quoted:
                open_quote = sum(text.count('"') for text in batch) % 2
                while open_quote and (more := next(lines, None)):
                    batch.append(more)
                    open_quote ^= more.count('"') % 2
            yield line, batch
            line += len(batch)
            self.line = line - 1
            if self._progress:
                self._progress(self._at())


def open_binary(path: Path) -> IO[bytes]:
    with disk_errors(path, "read"):
        return path.open("rb")


def unpacked(raw: IO[bytes]) -> IO[bytes]:
    """The file itself, or its contents if it begins as gzip data do."""
    magic = raw.read(2)
    raw.seek(0)
    return cast(IO[bytes], gzip.GzipFile(fileobj=raw)) if magic == b"\x1f\x8b" else raw


# Columns of CSV files: a whole list of fields at once, or one field with a reason why not.


def whole(texts: Sequence[str]) -> Ints:
    """Whole numbers from 0 to MOST_TOKENS. Raises ValueError if any field is none."""
    try:
        values = np.fromiter(map(int, texts), np.int64, len(texts))
    except (ValueError, OverflowError):
        values = np.fromiter((one_whole(text) for text in texts), np.int64, len(texts))
    outside = len(values) and (values.min() < 0 or values.max() > MOST_TOKENS)
    if outside or "_" in "".join(texts):
        return np.fromiter((one_whole(text) for text in texts), np.int64, len(texts))
    return values


def one_whole(text: str) -> int:
    """A whole number, also written like ``12.0``. Raises ValueError saying what is wrong."""
    try:
        value = float(text)
        fine = value.is_integer() and 0 <= value <= MOST_TOKENS and "_" not in text
    except ValueError:
        fine = False
    if not fine:
        raise ValueError(f"should be a whole number from 0 to {MOST_TOKENS:,}; {found(text)}")
    return int(value)


def seconds(texts: Sequence[str]) -> Floats:
    """Numbers from 0. Raises ValueError if any field is none."""
    try:
        values = np.fromiter(map(float, texts), np.float64, len(texts))
    except ValueError:
        values = np.array([np.nan])
    outside = len(values) and not (values.min() >= 0 and values.max() < np.inf)
    if outside or "_" in "".join(texts):
        return np.fromiter((one_time(text) for text in texts), np.float64, len(texts))
    return values


def one_time(text: str) -> float:
    """A number from 0. Raises ValueError saying what is wrong."""
    try:
        value = float(text)
        fine = 0 <= value < np.inf and "_" not in text
    except ValueError:
        fine = False
    if not fine:
        raise ValueError(f"should be a number from 0; {found(text)}")
    return value


def found(value: Any) -> str:
    """``found 'x'``, of reasonable length."""
    text = repr(value).encode(errors="backslashreplace").decode()
    return f"found {text}" if len(text) <= SHOWN else f"found {text[:SHOWN]}…"


Parser = Callable[[Sequence[str]], Column]


def one_by_one(parse: Callable[[str], Any], kind: npt.DTypeLike = object) -> Parser:
    """The parser of a column by one of its fields."""

    def column(texts: Sequence[str]) -> Column:
        values = np.empty(len(texts), kind)
        for index, text in enumerate(texts):
            values[index] = parse(text)
        return values

    return column


@dataclass(frozen=True)
class Table:
    """Some rows of a CSV file: columns by their names in the file, and the rows' lines.

    ``others`` are the columns that were not wanted, ``numbers`` the rows' places in the file.
    """

    columns: dict[str, Column]
    lines: Sequence[int]
    numbers: Ints
    others: Sequence[str] = ()

    def __getitem__(self, name: str) -> Column:
        return self.columns[name]


def open_csv(
    source: Source,
    lines: Iterator[str],
    needed: Mapping[str, Parser],
    also: Mapping[str, Parser] | None = None,
    quoted: bool = False,
    line: int = 1,
) -> Iterator[Table]:
    """The columns of a CSV file that its header names: those ``needed``, and ``also`` these.

    Upper and lower case are the same in names; the next line has the number ``line``. Raises
    InputError if a needed column is missing, or one that is wanted is there twice.
    """
    line, header = header_of(lines, line)
    wanted = {**needed, **(also or {})}
    known = {name.casefold(): name for name in wanted}
    header = [known.get(name.casefold(), name) for name in header]
    for name in wanted:
        if header.count(name) > 1:
            raise source.error(f"the header has {header.count(name)} columns {name}", line - 1)
    missing = [name for name in needed if name not in header]
    if missing:
        raise source.error(
            f"the header needs {', '.join(missing)}; found {', '.join(header) or 'nothing'}",
            line - 1,
        )
    yield from csv_tables(source, wanted, lines, line, header, quoted)


def header_of(lines: Iterable[str], number: int = 1) -> tuple[int, list[str]]:
    """The first line that is not empty, as CSV fields, and the number of the line after it."""
    for line in lines:
        number += 1
        if line.strip():
            return number, [name.strip() for name in next(csv.reader([line]))]
    return number, []


def csv_tables(
    source: Source,
    wanted: dict[str, Parser],
    lines: Iterator[str],
    line: int,
    header: Sequence[str],
    quoted: bool = False,
) -> Iterator[Table]:
    """The columns ``wanted`` of a CSV file whose next line has the number ``line``.

    A column that the header does not have is left out. Bad rows are handed to ``source``. A row is
    a line, unless ``quoted`` says that fields in quotes may go over several.
    """
    csv.field_size_limit(MOST_CHARACTERS)
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
        yield Table(columns, at, numbers, others)


def _all_rows(
    wanted: dict[str, Parser], places: dict[str, int], width: int, batch: list[str]
) -> dict[str, Column] | None:
    """The columns of all rows at once, or None if any row needs a closer look."""
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


def _lines_as_rows(source: Source, start: int, batch: list[str], quoted: bool) -> Iterator[_Row]:
    """The rows of some lines that are not empty, one by one."""
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
    source: Source, wanted: dict[str, Parser], places: dict[str, int], width: int, row: _Row
) -> bool:
    """Whether a row can be used; if not, it is handed to ``source``."""
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


# Records of JSON files.


@dataclass(frozen=True)
class Records:
    """Some records of a JSON lines file, and their lines."""

    records: list[dict[str, Any]]
    lines: list[int]
    numbers: Ints


def json_records(
    source: Source, check: Callable[[dict[str, Any]], None], lines: Iterator[str]
) -> Iterator[Records]:
    """The objects of a JSON lines file that ``check`` finds nothing wrong with.

    ``check`` raises ValueError as ``column: what would be right; found …``.
    """
    for start, batch in source.batches(lines):
        records, at, numbers = [], [], []
        for line, text in enumerate(batch, start):
            if not text.strip():
                continue
            source.tally.rows += 1
            try:
                record = _json_object(text)
                check(record)
            except ValueError as error:
                column, _, what = str(error).partition(": ")
                source.bad(line, column, what)
                continue
            records.append(record)
            at.append(line)
            numbers.append(source.tally.rows - 1)
        yield Records(records, at, np.array(numbers, np.int64))


def _json_object(text: str) -> dict[str, Any]:
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"row: should be a JSON object; found {str(error)[:SHOWN]}") from None
    if not isinstance(record, dict):
        raise ValueError(f"row: should be a JSON object; {found(record)}")
    return record


def json_whole(record: dict[str, Any], name: str) -> int:
    """A field with a whole number from 0. Raises ValueError saying what is wrong."""
    value = record.get(name)
    if type(value) is int and 0 <= value <= MOST_TOKENS:
        return value
    if isinstance(value, float) and value.is_integer() and 0 <= value <= MOST_TOKENS:
        return int(value)
    what = "is missing" if name not in record else found(value)
    raise ValueError(f"{name}: should be a whole number from 0 to {MOST_TOKENS:,}; {what}")


def json_time(record: dict[str, Any], name: str) -> float:
    """A field with a number from 0. Raises ValueError saying what is wrong."""
    value = record.get(name)
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < np.inf:
        return value
    what = "is missing" if name not in record else found(value)
    raise ValueError(f"{name}: should be a number from 0; {what}")


def json_ids(record: dict[str, Any], name: str) -> list[int]:
    """A field with a list of whole numbers. Raises ValueError saying what is wrong."""
    value = record.get(name)
    if isinstance(value, list) and all(type(item) is int and abs(item) < 1 << 62 for item in value):
        return value
    raise ValueError(f"{name}: should be a list of whole numbers; {found(value)}")


def served(source: Source, rows: Rows, lines: Sequence[int]) -> Rows:
    """The requests that had a prompt and an answer; the others are counted as failed."""
    silent = rows.output_tokens == 0
    empty = (rows.prompt_tokens == 0) & ~silent
    source.failed("with no output token", silent, lines)
    source.failed("with no prompt token", empty, lines)
    return rows.where(~(silent | empty))


def column_of(records: Iterable[Any], kind: npt.DTypeLike) -> Column:
    """A numpy column from Python values."""
    return np.array(list(records), kind)
