"""Where a request was in the step log: kept as numbers one behind the other, read as tuples."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from typing import NamedTuple


class RowSegment(NamedTuple):
    """A request in consecutive rows ``first`` to ``last`` of the step log.

    If ``emits``, a ``decode`` emits one token at the end of each of them and a ``prefill`` one at
    the end of the last.
    """

    kind: str
    first: int
    last: int
    emits: bool


class Chunk(NamedTuple):
    """In ``row`` a request computed ``tokens`` tokens on top of ``context`` ones that had KV."""

    row: int
    tokens: int
    context: int


#: What a span is, in the first of its three numbers; the others are its first row and its last.
DECODE, PREFILL, EMITS = 0, 2, 1
KINDS = ("decode", "decode", "prefill", "prefill")
#: Numbers of a span and of a chunk.
WIDTH = 3


def append_row(spans: array[int], row: int, *, decode: bool, emits: bool) -> bool:
    """The request is in ``row``; returns whether it goes on there with what it did before."""
    what = (DECODE if decode else PREFILL) + emits
    if spans and spans[-1] == row - 1:
        before = spans[-3]
        if before >> 1 == what >> 1 and (decode or not before & EMITS):
            spans[-3], spans[-1] = what, row
            return True
    spans.extend((what, row, row))
    return False


def read_segments(spans: array[int]) -> list[RowSegment]:
    """The spans that the numbers stand for."""
    one = iter(spans)
    return [
        RowSegment(KINDS[what], first, last, what & EMITS == EMITS)
        for what, first, last in zip(one, one, one, strict=True)
    ]


def emitting_ranges(spans: array[int]) -> Iterator[tuple[int, int]]:
    """Ranges (first, last) of rows of the step log at whose ends the request emitted a token."""
    one = iter(spans)
    for what, first, last in zip(one, one, one, strict=True):
        if what & EMITS:
            yield (last if what & PREFILL else first), last


def pack_segments(spans: Iterable[RowSegment]) -> array[int]:
    """The numbers that stand for spans."""
    found = array("i")
    for kind, first, last, emits in spans:
        found.extend(((DECODE if kind == "decode" else PREFILL) + emits, first, last))
    return found


def read_chunks(chunks: array[int]) -> list[Chunk]:
    """The chunks that the numbers stand for."""
    one = iter(chunks)
    return [Chunk(*numbers) for numbers in zip(one, one, one, strict=True)]


def shift_rows(numbers: array[int], rows: int, places: Iterable[int]) -> array[int]:
    """The same in a log that starts ``rows`` rows later; ``places`` of each three are rows."""
    found = numbers[:]
    for place in places:
        found[place::WIDTH] = array("i", [row + rows for row in numbers[place::WIDTH]])
    return found
