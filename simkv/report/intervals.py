"""What a request was doing at every moment, from the segments of its life."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from enum import StrEnum
from itertools import islice
from typing import NamedTuple

from simkv.loop.record import Life, Record, Segment
from simkv.why.ledger import lost

#: Times closer together than this (s) are one moment: sums of the same durations in another order.
NEGLIGIBLE = 1e-7


class State(StrEnum):
    """What a request does: exactly one of these from its arrival to its end."""

    WAITING = "waiting"  # not served yet, or passed over with its KV intact
    PREFILL = "prefill"
    DECODE = "decode"
    PREEMPTED = "preempted"  # its computed KV was taken away and it has not run again


class Interval(NamedTuple):
    """A request is in ``state`` from ``start`` to ``end``: seconds from the start of the run."""

    state: State
    start: float
    end: float


def intervals(record: Record, life: Life, paused: Sequence[int] | None = None) -> list[Interval]:
    """The life of a request as states that tile the time from its arrival to its end.

    Each interval starts exactly where the one before ends, and neighbours differ in state. A
    request whose end is not known lasts until ``record.end``; one that was to arrive after the end
    of the run has no intervals. Whoever asks for many requests gives ``pauses(record)`` with each.
    """
    finish = _finish(record, life)
    tiles: list[Interval] = []
    reached = life.request.arrival
    for state, _, until in _spans(record, life, paused):
        until = finish if until > finish - NEGLIGIBLE else until
        if until - reached <= NEGLIGIBLE and until < finish:
            continue
        if until <= reached:
            break
        if tiles and tiles[-1].state is state:
            tiles[-1] = tiles[-1]._replace(end=until)
        else:
            tiles.append(Interval(state, reached, until))
        reached = until
    return tiles


def wasted(record: Record, life: Life, paused: Sequence[int] | None = None) -> list[Interval]:
    """What the engine went on to compute for a request after its end, when nobody waited for it."""
    finish = _finish(record, life)
    return [
        Interval(state, max(start, finish), min(until, record.end))
        for state, start, until in _spans(record, life, paused)
        if state in (State.PREFILL, State.DECODE) and min(until, record.end) > finish + NEGLIGIBLE
    ]


def pauses(record: Record) -> list[int]:
    """Rows of the step log after which the engine computed nothing for a while."""
    ends, starts = record.steps.end, islice(record.steps.start, 1, None)
    pairs = enumerate(zip(ends, starts, strict=False))
    return [row for row, (end, start) in pairs if start - end > NEGLIGIBLE]


def _finish(record: Record, life: Life) -> float:
    return record.end if life.ended_at is None else life.ended_at


def _spans(record: Record, life: Life, paused: Sequence[int] | None) -> Iterator[Interval]:
    """All runs of a request and what lies between them, from its arrival and without an end.

    Neighbours meet only to within NEGLIGIBLE.
    """
    starts, ends = record.steps.start, record.steps.end
    runs = list(_runs(life, pauses(record) if paused is None else paused))
    yield Interval(State.WAITING, life.request.arrival, starts[runs[0].first] if runs else math.inf)
    for run, after in zip(runs, [*runs[1:], None], strict=False):
        yield Interval(State(run.kind), starts[run.first], ends[run.last])
        begin = ends[run.last]
        end = starts[after.first] if after else math.inf
        taken = min(max(begin, lost(life, run.last, after.first if after else None)), end)
        yield Interval(State.WAITING, begin, taken)
        yield Interval(State.PREEMPTED, taken, end)


def _runs(life: Life, paused: Sequence[int]) -> Iterator[Segment]:
    """The segments, cut wherever the engine paused inside one."""
    for segment in life.segments:
        first = segment.first
        for row in paused[bisect_left(paused, first) : bisect_left(paused, segment.last)]:
            yield segment._replace(first=first, last=row)
            first = row + 1
        yield segment._replace(first=first)
