"""Compute the wait ledgers of many requests together.

Only requests that wait before their first step, and not later, can be handled. This applies to most
requests. The results equal the ledgers of ``wait_ledger``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from simkv.explain.computed_runs import RUN_KINDS, Ints, RunTable
from simkv.explain.ledger_kinds import NEGLIGIBLE, LedgerKind, LedgerSegment
from simkv.sim.run_record import RequestRecord, RunRecord

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

#: Ledger kinds by code; kinds of runs have the first codes.
KINDS = (*RUN_KINDS, *(kind for kind in LedgerKind if kind not in RUN_KINDS))
CODES = {kind: code for code, kind in enumerate(KINDS)}


class _Waits(NamedTuple):
    """Intervals of the time before the first step of each request.

    Each possible interval has a column of kinds in ``kinds`` and a column of end times (s) in
    ``ends``; intervals may have zero length. The first column of ``ends`` contains the arrival
    times. ``simple`` is true for requests that the intervals describe completely.
    """

    ends: list[Floats]
    kinds: list[Ints]
    simple: Flags


def build_plain_ledgers(
    record: RunRecord,
    table: RunTable,
    at_head: Mapping[int, Sequence[LedgerSegment]],
    queue: Sequence[LedgerSegment],
    pauses: Sequence[int],
) -> dict[int, list[LedgerSegment]]:
    """Return the ledgers of requests that waited only before their first step, by id.

    ``at_head`` contains the intervals in which each request was the head of the queue. ``queue``
    contains the intervals in which any request was the head. ``pauses`` contains the steps before
    idle periods, as row numbers. Requests with preemptions or other gaps are omitted. The engine
    must not have halted, and no API server may be simulated.
    """
    lives = list(record.requests.values())
    bounds = table.bounds(len(lives))
    starts, stops = bounds[:-1], bounds[1:]
    resumed = record.resumed if record.prefix_cache else {}
    undisturbed = [
        life.interruptions is None and life.entered_at is None and life.request.id not in resumed
        for life in lives
    ]
    plain = (starts < stops) & np.array(undisturbed, dtype=bool)
    chosen = np.flatnonzero(plain & ~_has_gap(record, table, pauses, len(lives)))
    if not len(chosen):
        return {}
    own = [lives[i] for i in chosen.tolist()]
    first = table.first[starts[chosen]]
    waits = _describe_waits(record, own, first, at_head, queue)
    owner, kind, end = _lay_out(record, table, waits, chosen, starts[chosen], stops[chosen])
    return _collect(own, waits.simple, owner, kind, end)


def _has_gap(record: RunRecord, table: RunTable, pauses: Sequence[int], owners: int) -> Flags:
    """Return a mask of the requests with a gap between two steps."""
    start, end = np.array(record.steps.start), np.array(record.steps.end)
    same = table.owner[1:] == table.owner[:-1]
    gaps = same & (start[table.first[1:]] > end[table.last[:-1]])
    found = np.zeros(owners, dtype=bool)
    found[table.owner[1:][gaps]] = True
    if pauses:
        idle = np.array(pauses)
        here = np.searchsorted(idle, table.first) < np.searchsorted(idle, table.last)
        found[table.owner[here]] = True
    return found


def _describe_waits(
    record: RunRecord,
    lives: Sequence[RequestRecord],
    first: Ints,
    at_head: Mapping[int, Sequence[LedgerSegment]],
    queue: Sequence[LedgerSegment],
) -> _Waits:
    """Return the wait of each request until its first step. ``first`` contains the rows of these
    steps.
    """
    begin = np.array(record.steps.start)[first]
    decided = np.array(record.steps.decided)[first]
    arrival = _column(life.request.arrival for life in lives)
    received = _column(inf if life.received_at is None else life.received_at for life in lives)
    chosen = np.minimum(np.maximum(decided, arrival), begin)
    seen = np.minimum(np.maximum(received, arrival), chosen)
    none: list[LedgerSegment] = []
    heads = [at_head.get(life.request.id, none) for life in lives]
    head_start = _column(head[0].start if head else inf for head in heads)
    head_end = _column(head[0].end if head else inf for head in heads)
    head_kind = np.array([CODES[head[0].kind] if head else 0 for head in heads])
    # before this time, the request was behind the head
    at_first = np.minimum(np.maximum(head_start, seen), chosen)
    behind, covered = _behind(queue, seen, at_first)
    alone = np.array([len(head) < 2 for head in heads], dtype=bool)
    simple = covered & alone & ((head_end >= chosen) | (at_first >= chosen))
    count = len(lives)
    kinds = [
        np.full(count, CODES[LedgerKind.UNSEEN]),
        np.where(behind, CODES[LedgerKind.BEHIND], CODES[LedgerKind.QUEUED]),
        head_kind,
        np.full(count, CODES[LedgerKind.IN_FLIGHT]),
    ]
    return _Waits([arrival, seen, at_first, chosen, begin], kinds, simple)


def _behind(queue: Sequence[LedgerSegment], since: Floats, until: Floats) -> tuple[Flags, Flags]:
    """Return a mask of the intervals with a blocking head of the queue, and a mask of uniform
    intervals.

    An interval from ``since`` to ``until`` is uniform if the head blocks during the whole interval
    or not at all.
    """
    starts = _column([*(one.start for one in queue), inf])
    ends = _column([*(one.end for one in queue), inf])
    place = np.searchsorted(ends[:-1], since, side="right")
    throughout = (starts[place] <= since) & (ends[place] >= until)
    return throughout, throughout | (starts[place] >= until) | (since >= until)


def _lay_out(
    record: RunRecord, table: RunTable, waits: _Waits, chosen: Ints, starts: Ints, stops: Ints
) -> tuple[Ints, Ints, Floats]:
    """Return the request, kind and end time (s) of each wait and each run of steps, in order."""
    before = len(waits.kinds)
    sizes = before + stops - starts
    offset = np.cumsum(sizes) - sizes
    owner = np.repeat(np.arange(len(chosen)), sizes)
    kind = np.empty(len(owner), dtype=np.int64)
    end = np.empty(len(owner))
    exists = np.ones(len(owner), dtype=bool)
    for i, codes in enumerate(waits.kinds):
        kind[offset + i], end[offset + i] = codes, waits.ends[i + 1]
        exists[offset + i] = waits.ends[i + 1] > waits.ends[i]
    nth = np.arange(len(owner)) - offset[owner]
    runs = nth >= before
    index = (starts[owner] + nth - before)[runs]
    kind[runs], end[runs] = table.kind[index], np.array(record.steps.end)[table.last[index]]
    return owner[exists], kind[exists], end[exists]


def _collect(
    lives: Sequence[RequestRecord], simple: Flags, owner: Ints, kind: Ints, end: Floats
) -> dict[int, list[LedgerSegment]]:
    """Return the intervals of each request by id.

    Intervals are clipped at the end of the request, and adjacent intervals of the same kind are
    merged. Requests that end after their last step are omitted.
    """
    finish = _column(inf if life.ended_at is None else life.ended_at for life in lives)
    first = np.flatnonzero(np.diff(owner, prepend=-1))
    arrival = _column(life.request.arrival for life in lives)
    over = end > finish[owner] - NEGLIGIBLE
    end = np.where(over, finish[owner], end)
    start = np.concatenate([[0.0], end[:-1]])
    start[first] = arrival
    ended = np.concatenate([[False], over[:-1]])
    ended[first] = False
    keep = ~_carry(ended, owner)
    simple = simple & (finish < inf)
    simple[owner[keep & (end - start <= NEGLIGIBLE)]] = False
    done = np.zeros(len(lives), dtype=bool)
    done[owner[over]] = True
    keep &= (simple & done)[owner]
    owner, kind, end = owner[keep], kind[keep], end[keep]
    merged = np.ones(len(owner), dtype=bool)  # a new segment begins where owner or kind changes
    merged[:-1] = (owner[1:] != owner[:-1]) | (kind[1:] != kind[:-1])
    owner, kind, end = owner[merged], kind[merged], end[merged]
    return _to_segments(lives, owner, kind, end)


def _carry(flag: Flags, owner: Ints) -> Flags:
    """Return whether the flag is set in each row or an earlier row of the same request."""
    count = np.cumsum(flag)
    first = np.searchsorted(owner, owner)
    return count > (count - flag)[first]


def _to_segments(
    lives: Sequence[RequestRecord], owner: Ints, kind: Ints, end: Floats
) -> dict[int, list[LedgerSegment]]:
    ends: list[float] = end.tolist()
    starts = [0.0, *ends[:-1]]  # equal times share one float object
    owners, bounds = (
        owner[np.diff(owner, prepend=-1) > 0],
        np.flatnonzero(np.diff(owner, prepend=-1)),
    )
    places = [*bounds.tolist(), len(ends)]
    some = [lives[i] for i in owners.tolist()]
    for life, place in zip(some, places, strict=False):
        starts[place] = life.request.arrival
    made = list(map(LedgerSegment, map(KINDS.__getitem__, kind.tolist()), starts, ends))
    return {
        life.request.id: made[place:until]
        for life, place, until in zip(some, places[:-1], places[1:], strict=True)
    }


def _column(values: Any) -> Floats:
    return np.array(list(values), dtype=np.float64)
