"""Read traces of any known format, select rows, and convert them to requests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import numpy as np

from simkv.core.errors import InputError
from simkv.core.request import Request, Segment
from simkv.workload.clients import Dependency
from simkv.workload.request_columns import (
    EMPTY_COLUMNS,
    NAMED_STREAM,
    OUTPUT_STREAM,
    PROMPT_STREAM,
    Floats,
    PromptPieces,
    RequestRows,
    has_row_references,
    make_tuples,
    stream_name,
)
from simkv.workload.trace_selection import Selection
from simkv.workload.trace_source import Tally, TraceSource
from simkv.workload.workload_base import MAX_REQUEST_COUNT, make_random_stream

#: If a clock starts beyond this value in seconds (three years), it is a wall clock.
MIN_WALL_CLOCK_S = 1e8


class TraceReader:
    """Reader of a trace file, with the selected rows in the order of the file.

        reader = TraceReader(Path("trace.csv.gz"), Selection(start=60, duration=600))
        for rows in reader: ...     # a few thousand at a time
        print(reader.tally.lines())

    ``progress`` is called with the number of bytes read. ``columns`` maps simkv's column names to
    the names in a custom log.

    Raises InputError if the file does not exist or has an unknown format.
    """

    # Iteration raises InputError for invalid content.

    def __init__(
        self,
        path: Path,
        selection: Selection | None = None,
        format: str = "auto",
        progress: Callable[[int], None] | None = None,
        columns: Mapping[str, str] | None = None,
    ) -> None:
        self.selection = selection or Selection()
        from simkv.workload.formats.format_detection import (
            detect_format,  # imported here because it imports all formats
        )

        self.format, self.path = detect_format(path, format, columns)
        self._progress = progress
        self.source = TraceSource(self.path, self.selection, progress)

    def no_rows_error(self) -> InputError:
        """Return the error to raise if no request of the trace is left after the selection."""
        left_out = "; ".join(self.tally.lines()) or f"{self.tally.rows:,} rows"
        return InputError(
            f"{self.path}: the selection contains no requests of this trace ({left_out})"
        )

    @property
    def tally(self) -> Tally:
        """Counts of rows read and left out."""
        return self.source.tally

    def __iter__(self) -> Iterator[RequestRows]:
        self.source = TraceSource(self.path, self.selection, self._progress)
        yield from select_rows(self.format.rows(self.source), self.source)


def select_rows(parts: Iterable[RequestRows], source: TraceSource) -> Iterator[RequestRows]:
    """Yield the rows that the selection of the source accepts."""
    wanted = source.selection
    left = wanted.limit
    for rows in _sample(_window(parts, source), wanted):
        if left is not None:
            rows = rows.take(np.arange(left)) if left < len(rows) else rows
            left -= len(rows)
        if len(rows):
            yield rows.with_arrival((rows.arrival - wanted.start) / wanted.rate_scale)
        if left == 0:
            return


def _window(
    parts: Iterable[RequestRows], source: TraceSource
) -> Iterator[tuple[RequestRows, Floats]]:
    """Yield the rows in the selected time span, each with a random number for sampling."""
    wanted = source.selection
    draws = make_random_stream(wanted.seed)
    origin: float | None = None
    for rows in parts:
        if not len(rows):
            continue
        luck = draws.random(len(rows)) if wanted.sample is not None else rows.arrival
        if origin is None:
            origin = float(rows.arrival[0]) if rows.arrival[0] > MIN_WALL_CLOCK_S else 0.0
        if origin:
            rows = rows.with_arrival(rows.arrival - origin)
        if wanted.start or wanted.duration is not None:
            if np.isnan(rows.arrival[0]):
                raise source.error(
                    "contains no arrival times, so start and duration cannot be used"
                )
            end = np.inf if wanted.duration is None else wanted.start + wanted.duration
            inside = (rows.arrival >= wanted.start) & (rows.arrival < end)
            rows, luck = rows.where(inside), luck[inside]
        yield rows, luck


def _sample(
    parts: Iterable[tuple[RequestRows, Floats]], wanted: Selection
) -> Iterator[RequestRows]:
    """Yield the sampled rows."""
    # The rows are a fraction of all rows, or exactly the requested number.
    if isinstance(wanted.sample, int):
        yield _luckiest(parts, wanted.sample)
        return
    for rows, luck in parts:
        yield rows if wanted.sample is None else rows.where(luck < wanted.sample)


def _luckiest(parts: Iterable[tuple[RequestRows, Floats]], count: int) -> RequestRows:
    """Return the ``count`` rows with the smallest random numbers, in the order of the file."""
    kept: list[tuple[RequestRows, Floats]] = []
    size, bar = 0, np.inf
    for rows, luck in parts:
        below = luck < bar
        kept.append((rows.where(below), luck[below]))
        size += int(below.sum())
        if size > 2 * count:
            kept = [_cut(kept, count)]
            size, bar = count, float(kept[0][1].max())
    return _cut(kept, count)[0]


def _cut(kept: list[tuple[RequestRows, Floats]], count: int) -> tuple[RequestRows, Floats]:
    rows = RequestRows.concat([part for part, _ in kept]) if kept else RequestRows(*EMPTY_COLUMNS)
    luck = np.concatenate([np.zeros(0), *(luck for _, luck in kept)])
    if len(luck) > count:
        best = np.sort(np.argpartition(luck, count)[:count])
        rows, luck = rows.take(best), luck[best]
    return rows, luck


@dataclass(frozen=True)
class Trace:
    """Requests of a trace in order of arrival, as columns.

    ``sessions``, ``streams``, ``loras`` and ``clients`` are the names for the numbers in ``rows``.
    """

    path: Path
    format: str
    rows: RequestRows
    tally: Tally
    sessions: list[str]
    streams: list[str]
    loras: list[str] = field(default_factory=list)
    clients: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def timed(self) -> bool:
        """Whether the trace has arrival times."""
        return not len(self.rows) or not np.isnan(self.rows.arrival[0])

    def after(self) -> dict[int, Dependency]:
        """Return the dependency of each request that waits for others."""
        rows = self.rows
        after: dict[int, Dependency] = {}
        if rows.waits_for is None and (rows.session is None or rows.think_time is None):
            return after
        last: dict[int, int] = {}
        columns = (rows.column(name) for name in ("session", "think_time", "tool_time"))
        lists = (column.tolist() for column in (*columns, rows.column("waits_for")))
        for number, (session, think, tool, before) in enumerate(zip(*lists, strict=True)):
            waits = before
            if session >= 0:
                if not before and think == think and session in last:
                    waits = (last[session],)
                last[session] = number
            if waits:
                after[number] = Dependency(waits, _or_zero(think), _or_zero(tool))
        return after

    def requests(
        self,
        timeout: float | None = None,
        arrivals: Floats | None = None,
        max_tokens: int | None = None,
        ignore_eos: bool = False,
    ) -> list[Request]:
        """Return the requests, numbered in order of arrival.

        ``timeout`` (s) and ``max_tokens`` apply to requests without their own value. ``arrivals``
        (s) replace the arrival times of the trace.
        """
        rows = self.rows
        times = rows.arrival if arrivals is None else arrivals
        limits = rows.column("max_tokens")
        if max_tokens is not None:
            limits = np.where(limits > 0, limits, max_tokens)
        outputs = np.where(limits > 0, np.minimum(limits, rows.output_tokens), rows.output_tokens)
        return [
            Request(
                id=number,
                prompt_tokens=prompt,
                max_tokens=limit or output,
                arrival=arrival,
                priority=priority,
                has_images=images,
                ignore_eos=ignore or ignore_eos,
                segments=segments,
                lora=self.loras[lora] if lora >= 0 else None,
                client=self.clients[client] if client >= 0 else None,
                output_tokens=output,
                timeout=timeout if patience != patience else patience,
            )
            for number, (
                arrival,
                prompt,
                output,
                limit,
                priority,
                images,
                ignore,
                patience,
                lora,
                client,
                segments,
            ) in enumerate(
                zip(
                    times.tolist(),
                    rows.prompt_tokens.tolist(),
                    outputs.tolist(),
                    limits.tolist(),
                    rows.column("priority").tolist(),
                    rows.column("has_images").tolist(),
                    rows.column("ignore_eos").tolist(),
                    rows.column("timeout").tolist(),
                    rows.column("lora").tolist(),
                    rows.column("client").tolist(),
                    self._segments(),
                    strict=True,
                )
            )
        ]

    def _segments(self) -> Iterator[tuple[Segment, ...]]:
        """Yield the segments of every prompt."""
        # A prompt that shares no tokens has no segments.
        if self.rows.pieces is None:
            yield from ((),) * len(self)
            return
        known: dict[tuple[int, int, int, int], Segment] = {}
        prompts = self.rows.prompt_tokens.tolist()
        for number, pieces in enumerate(self.rows.pieces.by_row()):
            segments = []
            for piece in pieces:
                if piece not in known:
                    kind, value, start, end = piece
                    known[piece] = Segment(stream_name(kind, value, self.streams), start, end)
                segments.append(known[piece])
            rest = prompts[number] - sum(end - start for _, start, end in segments)
            if segments and rest:
                segments.append(Segment(f"u{number}", 0, rest))
            yield tuple(segments)


def _or_zero(seconds: float) -> float:
    return 0.0 if seconds != seconds else seconds


def read_trace(
    path: Path,
    selection: Selection | None = None,
    format: str = "auto",
    most: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> Trace:
    """Read a whole trace as columns, sorted by arrival.

    Raises InputError if the trace is unreadable or empty, or has more than ``most`` requests.
    """
    reader = TraceReader(path, selection, format, progress)
    parts, count = [], 0
    for rows in reader:
        count += len(rows)
        if most is not None and count > most:
            raise InputError(
                f"{path}: contains more than {most:,} requests; select fewer with duration, "
                "sample or limit"
            )
        parts.append(rows)
    if not parts:
        raise reader.no_rows_error()
    source = reader.source
    rows = sort_by_arrival(parts, source)
    return Trace(
        path,
        reader.format.name,
        rows,
        reader.tally,
        source.sessions.names,
        source.streams.names,
        source.loras.names,
        source.clients.names,
    )


def cached_trace(path: Path, selection: Selection | None = None, format: str = "auto") -> Trace:
    """Return a trace as ``read_trace`` does. The result is cached.

    Raises InputError if the trace is unusable or has more requests than a scenario may have.
    """
    # The result is cached because the variants of a scenario usually use the same trace.
    stamps = tuple((p.stat().st_mtime_ns, p.stat().st_size) for p in [path] if p.exists())
    return _cached(path.resolve(), stamps, selection or Selection(), format)


@lru_cache(maxsize=4)
def _cached(path: Path, _stamps: object, selection: Selection, format: str) -> Trace:
    return read_trace(path, selection, format, MAX_REQUEST_COUNT)


def sort_by_arrival(parts: Sequence[RequestRows], source: TraceSource) -> RequestRows:
    """Return all rows in order of arrival, with references to other rows renumbered."""
    return (
        renumber_rows(shift_to_zero(RequestRows.concat(parts).by_arrival()), source)
        if parts
        else RequestRows(*EMPTY_COLUMNS)
    )


def shift_to_zero(rows: RequestRows) -> RequestRows:
    """If the earliest arrival time is negative, shift all arrival times so that it becomes 0."""
    # The earliest arrival time can be negative in an unordered file.
    first = rows.arrival[0] if len(rows) else 0.0
    return rows.with_arrival(rows.arrival - first) if first < 0 else rows


def renumber_rows(rows: RequestRows, source: TraceSource) -> RequestRows:
    """Replace row numbers of the file with indices into ``rows``."""
    # Row numbers occur in pieces and ``waits_for``. If a piece belongs to a row that was not
    # selected, it becomes part of a named stream. A row no longer waits for rows that were not
    # selected.
    if not has_row_references(rows):
        return rows
    place = dict(zip(rows.column("number").tolist(), range(len(rows)), strict=True))
    if rows.waits_for is not None:
        rows.waits_for = make_tuples(
            [tuple(place[one] for one in before if one in place) for before in rows.waits_for]
        )
    pieces = rows.pieces
    if pieces is None:
        return rows
    kind, value = pieces.kind.copy(), pieces.value.copy()
    for index in np.flatnonzero((kind == OUTPUT_STREAM) | (kind == PROMPT_STREAM)).tolist():
        row = int(value[index])
        if row in place:
            value[index] = place[row]
        else:
            name = f"{stream_name(int(kind[index]), row, ())} of the whole trace"
            kind[index], value[index] = NAMED_STREAM, source.streams.number(name)
    rows.pieces = PromptPieces(pieces.first, kind, value, pieces.start, pieces.end)
    return rows
