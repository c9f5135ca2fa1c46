# mypyc: compile
"""Rows of the step log in which a request takes part, packed into arrays of integers."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from typing import NamedTuple


class RowSegment(NamedTuple):
    """Consecutive rows of the step log in which a request takes part.

    With ``emits``, a decode emits a token in each row, and a prefill emits a token in the last row.
    """

    # ``kind`` is ``prefill`` or ``decode``.

    kind: str
    first: int
    last: int
    emits: bool


class Chunk(NamedTuple):
    """Tokens computed for a request in one step.

    - ``row``: row of the step log.
    - ``tokens``: number of computed tokens.
    - ``context``: number of tokens whose KV was already cached.
    """

    row: int
    tokens: int
    context: int


#: Bits of the first of the three numbers of a segment; the other numbers are its first and last
#: row.
DECODE, PREFILL, EMITS = 0, 2, 1
KINDS = ("decode", "decode", "prefill", "prefill")
#: Number of integers per segment and per chunk.
WIDTH = 3


def append_row(spans: array[int], row: int, *, decode: bool, emits: bool) -> bool:
    """Add ``row`` to packed segments. Return whether the row extends the last segment."""
    what = (DECODE if decode else PREFILL) + emits
    if spans and spans[-1] == row - 1:
        before = spans[-3]
        if before >> 1 == what >> 1 and (decode or not before & EMITS):
            spans[-3], spans[-1] = what, row
            return True
    spans.extend((what, row, row))
    return False


def read_segments(spans: array[int]) -> list[RowSegment]:
    """Unpack segments from an array of integers."""
    one = iter(spans)
    return [
        RowSegment(KINDS[what], first, last, what & EMITS == EMITS)
        for what, first, last in zip(one, one, one, strict=True)
    ]


def first_row(spans: array[int]) -> int | None:
    """Return the first row of packed segments, or None."""
    return spans[1] if spans else None


def emitting_ranges(spans: array[int]) -> Iterator[tuple[int, int]]:
    """Yield ranges (first, last) of rows of the step log in which the request emits tokens."""
    one = iter(spans)
    for what, first, last in zip(one, one, one, strict=True):
        if what & EMITS:
            yield (last if what & PREFILL else first), last


def pack_segments(spans: Iterable[RowSegment]) -> array[int]:
    """Pack segments into an array of integers, three per segment."""
    found = array("i")
    for kind, first, last, emits in spans:
        found.extend(((DECODE if kind == "decode" else PREFILL) + emits, first, last))
    return found


def read_chunks(chunks: array[int]) -> list[Chunk]:
    """Unpack chunks from an array of integers."""
    one = iter(chunks)
    return [Chunk(*numbers) for numbers in zip(one, one, one, strict=True)]


def shift_rows(numbers: array[int], rows: int, places: Iterable[int]) -> array[int]:
    """Return a copy of packed segments or chunks in which all row numbers are ``rows`` larger."""
    # ``places`` are the positions of row numbers in each group of three integers.
    found = numbers[:]
    for place in places:
        found[place::WIDTH] = array("i", [row + rows for row in numbers[place::WIDTH]])
    return found
