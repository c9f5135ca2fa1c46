"""The wait ledger of a request: its activity or the reason of its wait at any time.

   for interval in build_ledger(record)[7]:
       print(interval.start, interval.end, KIND_LABELS[interval.kind])

The times come from the step log. The reasons come from the scheduler, which reports why it did not
schedule the head of its queue (``Batch.held``) and which requests it skipped (``Batch.aside``).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from math import fsum, inf
from operator import attrgetter

from simkv.core.outcome import Outcome
from simkv.explain.computed_runs import ComputeRun, RunTable, compute_runs, kv_lost_at
from simkv.explain.ledger_columns import build_plain_ledgers
from simkv.explain.ledger_kinds import NEGLIGIBLE, LedgerKind, LedgerSegment
from simkv.sim.run_record import RequestRecord, RunRecord


def build_ledger(
    record: RunRecord, among: Iterable[int] | None = None, table: RunTable | None = None
) -> dict[int, list[LedgerSegment]]:
    """Return the wait ledger of each request, by request id.

    The ledger is a list of consecutive intervals from the arrival to the end of the request. The
    sum of their durations is the E2E latency, or the time until the outcome of an unfinished
    request. ``among`` contains the ids of the requests (default: all). ``table`` is the result of
    ``tabulate_runs``, which makes the computation faster.
    """
    engine = _Engine(record)
    lives = record.requests
    ids = lives if among is None else among
    plain: dict[int, list[LedgerSegment]] = {}
    if table is not None and not engine.front_end and engine.stopped == inf:
        plain = build_plain_ledgers(record, table, engine.at_head, engine.queue, engine.pauses)
    return {i: plain.get(i) or _tile(lives[i], _spans(lives[i], engine)) for i in ids}


def find_wasted_segments(
    record: RunRecord, life: RequestRecord, paused: Sequence[int] | None = None
) -> list[LedgerSegment]:
    """Return the intervals in which the engine computed for a request that had already ended.

    ``paused`` is the result of ``find_pauses(record)``.
    """
    log, found = record.steps, list[LedgerSegment]()
    finish = record.end if life.ended_at is None else life.ended_at
    for run in _cut(compute_runs(life), find_pauses(record) if paused is None else paused):
        start, end = max(log.start[run.first], finish), min(log.end[run.last], record.end)
        if end <= finish + NEGLIGIBLE:
            continue
        if found and found[-1].kind is run.kind and start - found[-1].end <= NEGLIGIBLE:
            found[-1] = found[-1]._replace(end=end)
        else:
            found.append(LedgerSegment(run.kind, start, end))
    return found


def find_pauses(record: RunRecord) -> list[int]:
    """Return the steps before idle periods, as row numbers of the step log."""
    following = zip(record.steps.end, islice(record.steps.start, 1, None), strict=False)
    return [row for row, (end, start) in enumerate(following) if start - end > NEGLIGIBLE]


def _cut(computed: Iterable[ComputeRun], paused: Sequence[int]) -> Iterator[ComputeRun]:
    for run in computed:
        first = run.first
        for row in paused[bisect_left(paused, first) : bisect_left(paused, run.last)]:
            yield run._replace(first=first, last=row)
            first = row + 1
        yield run if first == run.first else run._replace(first=first)


def total_by_kind(intervals: Iterable[LedgerSegment]) -> dict[LedgerKind, float]:
    """Return the total seconds of each kind, in the order of ``LedgerKind``."""
    seconds: dict[LedgerKind, list[float]] = {}
    for interval in intervals:
        seconds.setdefault(interval.kind, []).append(interval.seconds)
    return {kind: fsum(seconds[kind]) for kind in LedgerKind if kind in seconds}


def _tile(life: RequestRecord, spans: Iterable[LedgerSegment]) -> list[LedgerSegment]:
    """Return the intervals, clipped at the end of the request, with adjacent equal ones merged."""
    finish = inf if life.ended_at is None else life.ended_at
    tiles: list[LedgerSegment] = []
    reached = life.request.arrival
    for kind, _, until in spans:
        until = finish if until > finish - NEGLIGIBLE else until
        if until <= reached:
            continue
        if until - reached <= NEGLIGIBLE and until < finish:
            continue
        if tiles and tiles[-1].kind is kind:
            tiles[-1] = tiles[-1]._replace(end=until)
        else:
            tiles.append(LedgerSegment(kind, reached, until))
        reached = until
        if reached == finish:
            break
    return tiles


def _spans(life: RequestRecord, engine: _Engine) -> Iterator[LedgerSegment]:
    """Yield intervals with the activity or wait reason of a request, from its arrival on."""
    log = engine.log
    before: ComputeRun | None = None
    reached = life.request.arrival
    aside = _among(_aside(life))
    for after in chain(_cut(compute_runs(life), engine.pauses), (None,)):
        begins = log.start[after.first] if after else inf
        if begins > reached:
            yield from _paint(reached, begins, _layers(life, engine, aside, before, after))
        if after:
            reached = log.end[after.last]
            yield LedgerSegment(engine.kind(life, after), begins, reached)
        before = after


#: A function that returns the segments of a request between two times (s).
Layer = Callable[[float, float], Iterable[LedgerSegment]]


def _layers(
    life: RequestRecord,
    engine: _Engine,
    aside: Layer,
    before: ComputeRun | None,
    after: ComputeRun | None,
) -> list[Layer]:
    """Return functions that explain the gap between two runs of steps, in order of precedence.

    Each function returns the intervals with one possible reason between two times (s).
    """
    decided = engine.log.decided[after.first] if after else inf
    layers = [_stretch(LedgerKind.STALLED, engine.stopped, inf)]
    chosen = _stretch(LedgerKind.IN_FLIGHT, decided, inf)
    if before is None:
        unseen = _stretch(
            LedgerKind.UNSEEN, -inf, inf if life.received_at is None else life.received_at
        )
        if life.entered_at is not None:
            layers.append(_stretch(LedgerKind.FRONT_END, -inf, life.entered_at))
        head = _among(engine.at_head.get(life.request.id, []))
        layers += [chosen, unseen, head, aside, _among(engine.queue)]
        return [*layers, _stretch(LedgerKind.QUEUED, -inf, inf)]
    if after is None and engine.front_end and life.outcome is Outcome.FINISHED:
        return [*layers, _stretch(LedgerKind.FRONT_END, -inf, inf)]
    taken = kv_lost_at(life, before.last, after.first if after else None)
    if taken < inf:
        layers += [_stretch(LedgerKind.PREEMPTED, taken, decided), chosen]
    return [*layers, aside, engine.prefills, _stretch(LedgerKind.IN_FLIGHT, -inf, inf)]


def _paint(start: float, end: float, layers: Sequence[Layer]) -> Iterator[LedgerSegment]:
    """Yield intervals from ``start`` to ``end`` with the reason of the first layer that has one."""
    for piece in layers[0](start, end):
        left, right = max(piece.start, start), min(piece.end, end)
        if left > start:
            yield from _paint(start, left, layers[1:])
        if right > start:
            yield LedgerSegment(piece.kind, left, right)
            start = right
    if start < end:
        yield from _paint(start, end, layers[1:])


def _stretch(kind: LedgerKind, start: float, end: float) -> Layer:
    return lambda left, right: (
        [LedgerSegment(kind, start, end)] if start < right and left < end else []
    )


def _among(intervals: Sequence[LedgerSegment]) -> Layer:
    """Return a function that returns the given ordered intervals between two times (s)."""

    def within(start: float, end: float) -> Iterator[LedgerSegment]:
        first = bisect_right(intervals, start, key=attrgetter("end"))
        for index in range(first, len(intervals)):
            if intervals[index].start >= end:
                return
            yield intervals[index]

    return within


def _aside(life: RequestRecord) -> list[LedgerSegment]:
    """Return the intervals in which the scheduler reported the request as skipped."""
    ends = [at for at, _ in life.aside[1:]] + [inf]
    return [
        LedgerSegment(LedgerKind(why), start, end)
        for (start, why), end in zip(life.aside, ends, strict=False)
        if why and end > start
    ]


class _Engine:
    """Data of a run that the ledgers of all requests share.

    ``at_head`` contains the intervals in which each request was the head of the queue. ``queue``
    contains the intervals in which any request was the head and blocked others. ``front_end`` is
    true if an API server was simulated. ``stopped`` is the time (s) at which the engine halted, or
    infinity.
    """

    def __init__(self, record: RunRecord) -> None:
        log = self.log = record.steps
        self._resumed = record.resumed if record.prefix_cache else {}
        self.front_end = record.delivered is not None
        self.stopped = record.engine_halt.since if record.engine_halt else inf
        self.at_head: dict[int, list[LedgerSegment]] = {}
        self.queue: list[LedgerSegment] = []
        ends = [at for at, _ in record.queue_heads[1:]] + [inf]
        for (start, held), end in zip(record.queue_heads, ends, strict=False):
            if held is None or end <= start:
                continue
            head = LedgerSegment(LedgerKind(held.why), start, end)
            self.at_head.setdefault(held.id, []).append(head)
            if self.queue and self.queue[-1].end == start:
                self.queue[-1] = self.queue[-1]._replace(end=end)
            else:
                self.queue.append(LedgerSegment(LedgerKind.BEHIND, start, end))
        self.pauses = find_pauses(record)
        # Last rows before a change between steps with a prefill and steps without a prefill.
        turns = zip(log.prefill_seqs, log.prefill_seqs[1:], strict=False)
        self._turns = [row for row, (a, b) in enumerate(turns) if (a > 0) != (b > 0)]

    def kind(self, life: RequestRecord, run: ComputeRun) -> LedgerKind:
        """Return the kind of a run of steps.

        A prefill is ``EVICTED`` if more than half of its tokens belong to an evicted prefix of an
        earlier turn.
        """
        resumed = self._resumed.get(life.request.id)
        if resumed is None or run.kind is not LedgerKind.PREFILL:
            return run.kind
        lost = min(resumed.tokens, run.context + run.tokens) - run.context
        return LedgerKind.EVICTED if 2 * lost > run.tokens else LedgerKind.PREFILL

    def prefills(self, start: float, end: float) -> Iterator[LedgerSegment]:
        """Yield the intervals between ``start`` and ``end`` (s) with prefills in every step."""
        log, turns = self.log, self._turns
        row = bisect_right(log.end, start)
        stop = bisect_left(log.start, end)
        for turn in [*turns[bisect_left(turns, row) : bisect_left(turns, stop)], stop]:
            last = min(turn, stop - 1)
            if row <= last and log.prefill_seqs[row]:
                yield LedgerSegment(LedgerKind.HELD_UP, log.start[row], log.end[last])
            row = turn + 1
