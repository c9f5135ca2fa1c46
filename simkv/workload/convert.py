"""From any trace to simkv's own form."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import IO

import numpy as np

from simkv.core.errors import InputError
from simkv.core.files import writing
from simkv.core.request import Request
from simkv.workload.rows import EMPTY, OWN, Names, Pieces, Rows, is_sorted, piece_of
from simkv.workload.source import Source
from simkv.workload.trace import Reader, from_zero, numbered
from simkv.workload.traces.own import used_columns, write_csv, write_file
from simkv.workload.traces.parquet import write_parquet


class _Again(Exception):
    """The trace needs more than was foreseen: more columns, or to be read as a whole."""

    def __init__(self, columns: Sequence[str], whole: bool) -> None:
        super().__init__()
        self.columns, self.whole = columns, whole


def convert(reader: Reader, out: Path) -> int:
    """Write what ``reader`` takes to ``out``, in the order of arrival; returns how many requests.

    A few thousand rows at a time; only a trace that is not in order, or whose prompts tell of other
    rows, is held in memory. The file is there complete or not at all. Raises InputError if the
    trace cannot be read, is empty, or the file cannot be written.
    """
    with writing(out) as new:

        def to_file(parts: Iterable[Rows], columns: Sequence[str]) -> int:
            write = write_parquet if out.suffix == ".parquet" else write_file
            return write(new, parts, columns, reader.source)

        return _write(reader, to_file)


def _write(reader: Reader, target: Callable[[Iterable[Rows], Sequence[str]], int]) -> int:
    """Write with as few columns as there may be, beginning anew if that was too few."""
    columns: Sequence[str] = ()
    whole = False
    while True:
        parts = iter([in_order(list(reader), reader)] if whole else reader)
        first = next(parts, None)
        if first is None or not len(first):
            left_out = "; ".join(reader.tally.lines()) or f"{reader.tally.rows:,} rows"
            raise InputError(f"{reader.path}: no request is left of this trace ({left_out})")
        columns = used_columns(first, columns)
        try:
            return target(_checked(first, parts, columns, whole), columns)
        except _Again as again:
            columns, whole = again.columns, whole or again.whole


def _checked(
    first: Rows, parts: Iterator[Rows], columns: Sequence[str], whole: bool
) -> Iterator[Rows]:
    """The rows, as long as they are in order and have no other columns."""
    last = 0.0
    rows: Rows | None = first
    while rows is not None:
        used = used_columns(rows, columns)
        out_of_order = rows.arrival[0] < last or not (
            is_sorted(rows.arrival) or "arrival" not in columns
        )
        refers = rows.pieces is not None and rows.pieces.refer_to_rows()
        if len(used) > len(columns) or (not whole and (out_of_order or refers)):
            raise _Again(used, out_of_order or refers)
        last = float(rows.arrival[-1])
        yield rows
        rows = next(parts, None)


def in_order(parts: Sequence[Rows], reader: Reader) -> Rows:
    """All rows in the order of arrival, with pieces that tell of rows by their new places."""
    if not parts:
        return Rows(*EMPTY)
    return numbered(from_zero(Rows.concat(parts).by_arrival()), reader.source)


def print_rows(parts: Sequence[Rows], reader: Reader, to: IO[str]) -> None:
    """Write rows as CSV to an open file."""
    rows = in_order(parts, reader)
    write_csv(to, [rows], used_columns(rows), reader.source)


def rows_of(
    requests: Sequence[Request], after: Mapping[int, tuple[int, float]], streams: Names
) -> Rows:
    """Requests as columns, so that they can be written; ``after`` as in ``Clients``.

    They must be numbered 0, 1, 2, ... in their order, as a trace's rows are.
    """
    thinks = [after[r.id][1] if r.id in after else math.nan for r in requests]
    sessions: list[int] = []
    fresh = count()
    for request in requests:
        before = after.get(request.id)
        sessions.append(next(fresh) if before is None else sessions[before[0]])
    pieces = [
        [piece_of(segment, streams) for segment in request.segments if segment.end > segment.start]
        for request in requests
    ]
    for request, row in zip(requests, pieces, strict=True):
        if row and row[-1][:3] == (OWN, request.id, 0):
            row.pop()  # what is left of a prompt is its own anyway
    return Rows(
        arrival=np.array([r.arrival for r in requests], np.float64),
        prompt_tokens=np.array([r.prompt_tokens for r in requests], np.int64),
        output_tokens=np.array([r.output_tokens for r in requests], np.int64),
        max_tokens=np.array(
            [0 if r.max_tokens == r.output_tokens else r.max_tokens for r in requests], np.int64
        ),
        priority=np.array([r.priority for r in requests], np.int64),
        timeout=np.array([math.nan if r.timeout is None else r.timeout for r in requests]),
        ignore_eos=np.array([r.ignore_eos for r in requests], np.bool_),
        has_images=np.array([r.has_images for r in requests], np.bool_),
        session=np.array(sessions, np.int64) if after else None,
        think_time=np.array(thinks) if after else None,
        number=np.arange(len(requests)),
        pieces=Pieces.of(pieces),
    )


def write_requests(
    path: Path, requests: Sequence[Request], after: Mapping[int, tuple[int, float]]
) -> int:
    """Write requests as a trace in simkv's own form; returns their number."""
    source = Source(path)
    rows = rows_of(requests, after, source.streams)
    for session in range(int(rows.session.max()) + 1 if rows.session is not None else 0):
        source.sessions.number(f"s{session}")
    write = write_parquet if path.suffix == ".parquet" else write_file
    return write(path, [rows], used_columns(rows), source)
