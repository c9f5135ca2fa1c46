"""Requests as numpy columns, the output of trace readers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any
from urllib.parse import quote, unquote

import numpy as np
import numpy.typing as npt

from simkv.core.request import Segment

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

#: Kinds of token streams: a block identified by its hash, a named stream, the output tokens of
#: another row of the trace, and prompt tokens that only another row has.
HASH_STREAM, NAMED_STREAM, OUTPUT_STREAM, PROMPT_STREAM = range(4)
_PREFIX = {HASH_STREAM: "h", OUTPUT_STREAM: "o", PROMPT_STREAM: "u"}
_KIND = {prefix: kind for kind, prefix in _PREFIX.items()}
_STREAM = re.compile(r"([hou])(0|[1-9][0-9]{0,17})")
_PIECE = re.compile(r"([^:]+):(?:([0-9]{1,12})-)?([0-9]{1,12})")


class NameTable:
    """Bidirectional mapping between names and numbers, in order of first use."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._numbers: dict[str, int] = {}

    def number(self, name: str) -> int:
        found = self._numbers.setdefault(name, len(self.names))
        if found == len(self.names):
            self.names.append(name)
        return found


@dataclass(slots=True)
class PromptPieces:
    """Beginnings of prompts, composed of pieces that several prompts can share.

    The prompt of row ``i`` begins with the pieces ``first[i]`` to ``first[i + 1]`` (exclusive). A
    piece consists of the tokens ``start`` to ``end`` (exclusive) of a token stream. ``kind`` and
    ``value`` identify the stream.
    """

    # Prompt tokens after the pieces are unique to the prompt.

    first: Ints
    kind: npt.NDArray[np.int8]
    value: Ints
    start: Ints
    end: Ints

    @staticmethod
    def of(rows: Sequence[Sequence[tuple[int, int, int, int]]]) -> PromptPieces:
        """Build from ``(kind, value, start, end)`` tuples for each row."""
        first = _starts([len(row) for row in rows])
        table = np.array([piece for row in rows for piece in row], np.int64).reshape(-1, 4)
        kind, value, start, end = (np.ascontiguousarray(column) for column in table.T)
        return PromptPieces(first, kind.astype(np.int8), value, start, end)

    @staticmethod
    def from_hashes(hashes: Sequence[Sequence[int]], block: int, prompts: Ints) -> PromptPieces:
        """Build from the hash ids of prompt blocks of ``block`` tokens."""
        # The last block may be partial.
        counts = np.array([len(ids) for ids in hashes], np.int64)
        first = _starts(counts)
        value = np.array([name for ids in hashes for name in ids], np.int64)
        index = np.arange(len(value)) - np.repeat(first[:-1], counts)
        end = np.minimum(block, np.repeat(prompts, counts) - index * block)
        kind = np.full(len(value), HASH_STREAM, np.int8)
        return PromptPieces(first, kind, value, np.zeros(len(value), np.int64), end)

    @staticmethod
    def none(count: int) -> PromptPieces:
        """Return the pieces of ``count`` prompts that share no tokens."""
        return PromptPieces.of([()] * count)

    def take(self, rows: Ints) -> PromptPieces:
        """Return the pieces of ``rows``, in the given order."""
        counts = np.diff(self.first)[rows]
        first = _starts(counts)
        index = np.repeat(self.first[:-1][rows] - first[:-1], counts) + np.arange(first[-1])
        columns = (self.kind, self.value, self.start, self.end)
        kind, value, start, end = (column[index] for column in columns)
        return PromptPieces(first, kind, value, start, end)

    @staticmethod
    def concat(parts: Sequence[PromptPieces]) -> PromptPieces:
        offsets = np.cumsum([0, *(len(part.value) for part in parts)])
        first = [part.first[:-1] + offset for part, offset in zip(parts, offsets[:-1], strict=True)]
        columns = [
            np.concatenate([getattr(part, name) for part in parts])
            for name in ("kind", "value", "start", "end")
        ]
        return PromptPieces(np.concatenate([*first, offsets[-1:]]), *columns)

    def has_row_references(self) -> bool:
        """Return whether any piece consists of tokens of another row."""
        return bool((self.kind >= OUTPUT_STREAM).any())

    def by_row(self) -> Iterator[list[tuple[int, int, int, int]]]:
        """Yield the ``(kind, value, start, end)`` tuples of each row."""
        columns = (self.kind, self.value, self.start, self.end)
        flat = list(zip(*(column.tolist() for column in columns), strict=True))
        first = self.first.tolist()
        for low, high in pairwise(first):
            yield flat[low:high]


def _starts(counts: npt.ArrayLike) -> Ints:
    """Return the start offsets of parts with the given lengths, and the end of the last part."""
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)


@dataclass(slots=True)
class RequestRows:
    """Requests as columns of equal length, one row per request. A column may be None.

    - ``arrival``, ``timeout``, ``think_time``, ``tool_time``: seconds, NaN if missing.
    - ``acceptance``: NaN if missing.
    - ``max_tokens``: 0 means the output length.
    - ``session``, ``lora``, ``client``: numbers that stand for names; -1 if missing.
    - ``number``: index of the row in the file.
    - ``waits_for``: numbers of the rows whose answers a row waits for.
    """

    # ``arrival`` is on the trace's own clock. A column that is None has the value for missing data
    # in every row.

    arrival: Floats
    prompt_tokens: Ints
    output_tokens: Ints
    max_tokens: Ints | None = None
    priority: Ints | None = None
    timeout: Floats | None = None
    ignore_eos: Flags | None = None
    has_images: Flags | None = None
    lora: Ints | None = None
    client: Ints | None = None
    acceptance: Floats | None = None
    session: Ints | None = None
    think_time: Floats | None = None
    tool_time: Floats | None = None
    waits_for: npt.NDArray[np.object_] | None = None
    number: Ints | None = None
    pieces: PromptPieces | None = None

    def __len__(self) -> int:
        return len(self.arrival)

    def take(self, rows: Ints) -> RequestRows:
        """Return the rows at the indices ``rows``, in the given order."""
        taken: dict[str, Any] = {
            name: column.take(rows) for name, column in self._columns() if column is not None
        }
        return RequestRows(**taken)

    def where(self, keep: Flags) -> RequestRows:
        """Return the rows for which ``keep`` is true."""
        return self if keep.all() else self.take(np.flatnonzero(keep))

    def column(self, name: str) -> Any:
        """Return a column with defaults filled in."""
        column = getattr(self, name)
        if column is not None:
            return column
        if name == "pieces":
            return PromptPieces.none(len(self))
        if name == "waits_for":
            return make_tuples([()] * len(self))
        default = COLUMN_DEFAULTS[name]
        return np.full(len(self), default, np.array(default).dtype)

    def _columns(self) -> list[tuple[str, Any]]:
        return [(field.name, getattr(self, field.name)) for field in fields(self)]

    @staticmethod
    def concat(parts: Sequence[RequestRows]) -> RequestRows:
        """Concatenate ``parts``."""
        if len(parts) == 1:
            return parts[0]
        columns: dict[str, Any] = {}
        for field in fields(RequestRows):
            if all(getattr(part, field.name) is None for part in parts):
                continue
            values = [part.column(field.name) for part in parts]
            if field.name == "pieces":
                columns[field.name] = PromptPieces.concat(values)
            else:
                columns[field.name] = np.concatenate(values)
        return RequestRows(**columns) if columns else RequestRows(*EMPTY_COLUMNS)

    def by_arrival(self) -> RequestRows:
        """Return the rows in order of arrival, with a stable sort."""
        if is_sorted(self.arrival):
            return self
        return self.take(np.argsort(self.arrival, kind="stable"))

    def with_arrival(self, arrival: Floats) -> RequestRows:
        return replace(self, arrival=arrival)


#: Default values of missing columns.
COLUMN_DEFAULTS: dict[str, Any] = {
    "max_tokens": 0,
    "priority": 0,
    "timeout": np.nan,
    "ignore_eos": False,
    "has_images": False,
    "lora": -1,
    "client": -1,
    "acceptance": np.nan,
    "session": -1,
    "think_time": np.nan,
    "tool_time": np.nan,
    "number": -1,
}
EMPTY_COLUMNS = (np.zeros(0), np.zeros(0, np.int64), np.zeros(0, np.int64))


def make_tuples(values: Sequence[tuple[int, ...]]) -> npt.NDArray[np.object_]:
    """Return a column of tuples."""
    column = np.empty(len(values), object)
    for index, value in enumerate(values):
        column[index] = value
    return column


def has_row_references(rows: RequestRows) -> bool:
    """Return whether any row waits for another row, or any prompt contains tokens of
    another row.
    """
    waits = rows.waits_for is not None and any(rows.waits_for)
    return waits or (rows.pieces is not None and rows.pieces.has_row_references())


def is_sorted(values: Floats) -> bool:
    """Return whether values never decrease and contain no NaN."""
    return bool((np.diff(values) >= 0).all()) if len(values) > 1 else True


def stream_name(kind: int, value: int, names: Sequence[str]) -> str:
    """Return the name of the token stream of a piece.

    A stream without its own name is ``h<id>`` (hashed block), ``o<row>`` (output of a row) or
    ``u<row>`` (prompt of a row).
    """
    return names[value] if kind == NAMED_STREAM else f"{_PREFIX[kind]}{value}"


def parse_pieces(text: str, names: NameTable) -> list[tuple[int, int, int, int]]:
    """Parse pieces written as ``stream:end`` or ``stream:start-end``, separated by blanks.

    Raises ValueError if a piece is invalid.
    """
    pieces = []
    for word in text.split():
        found = _PIECE.fullmatch(word)
        if not found:
            raise ValueError(f"should be pieces such as h12:512 or o3:0-100; found {word[:60]!r}")
        stream, start, end = unquote(found[1]), int(found[2] or 0), int(found[3])
        if start >= end:
            raise ValueError(f"the end of each piece must be after its start; found {word!r}")
        pieces.append(piece_from_segment(Segment(stream, start, end), names))
    return pieces


def piece_from_segment(segment: Segment, names: NameTable) -> tuple[int, int, int, int]:
    """Return ``(kind, value, start, end)`` of a segment."""
    known = _STREAM.fullmatch(segment.stream)
    if known:
        return _KIND[known[1]], int(known[2]), segment.start, segment.end
    return NAMED_STREAM, names.number(segment.stream), segment.start, segment.end


def format_pieces(pieces: Sequence[tuple[int, int, int, int]], names: Sequence[str]) -> str:
    """Format pieces as text that ``parse_pieces`` can read."""
    words = []
    for kind, value, start, end in pieces:
        stream = stream_name(kind, value, names)
        stream = quote(stream, safe="") if kind == NAMED_STREAM else stream
        words.append(f"{stream}:{start}-{end}" if start else f"{stream}:{end}")
    return " ".join(words)
