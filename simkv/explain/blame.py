"""Preemptions, overtakes and wasted GPU time of a run."""

from __future__ import annotations

from bisect import bisect_left, insort
from itertools import groupby
from math import fsum, inf
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from simkv.explain.computed_runs import DECODE_CODE, RunTable, compute_runs
from simkv.explain.ledger_kinds import NEGLIGIBLE
from simkv.sim.run_record import RunRecord
from simkv.sim.segments import first_row

Floats = npt.NDArray[np.float64]

#: Reasons of preemptions as phrases.
PREEMPTION_LABELS = {
    "blocks": "because the KV cache was full",
    "bucket": "because sequences of another length were running",
    "patience": "because the head of the queue waited too long",
}


class Preemption(NamedTuple):
    """Preemption of the request ``victim`` at ``at`` (s).

    ``by`` is the request that benefits, or None for several. ``why`` is the reason: ``blocks`` (too
    few blocks), ``bucket`` (another length bucket runs) or ``patience`` (the head of the queue had
    waited too long). ``tokens`` is the number of tokens whose KV was lost.
    """

    at: float
    victim: int
    by: int | None
    why: str
    tokens: int


class Overtake(NamedTuple):
    """The request ``victim`` was overtaken by ``others`` requests that arrived later but started
    earlier.

    ``by`` is the request that started first. ``seconds`` is the time between the starts of ``by``
    and of ``victim``. If ``victim`` never started, its end counts as its start.
    """

    victim: int
    by: int
    seconds: float
    others: int


class WastedTime(NamedTuple):
    """GPU time without benefit, in seconds.

    The duration of a step is divided equally among its tokens. ``gone`` is time for requests that
    had ended. ``dropped`` is time for tokens that were discarded. ``recompute`` is time for tokens
    that had been computed before. ``busy`` is the total time of all steps.
    """

    gone: float
    dropped: float
    recompute: float
    busy: float

    @property
    def total(self) -> float:
        """Total wasted GPU time in seconds."""
        return self.gone + self.dropped + self.recompute


def find_preemptions(record: RunRecord) -> list[Preemption]:
    """Return all preemptions, in order of time."""
    found = []
    for i, life in record.requests.items():
        if not life.preempted_at:
            continue
        computed = list(compute_runs(life))
        firsts = [run.first for run in computed]
        taken = zip(life.preempted_at, life.preempted_rows, life.causes, strict=True)
        for at, row, cause in taken:
            index = bisect_left(firsts, row) - 1
            tokens = 0
            if index >= 0:
                run = computed[index]
                tokens = run.context + run.tokens * (min(row, run.last + 1) - run.first)
            found.append(Preemption(at, i, cause.by, cause.why, tokens))
    return sorted(found, key=lambda preemption: preemption.at)


def find_overtakes(record: RunRecord) -> list[Overtake]:
    """Return the overtaken requests, the longest delay first."""
    starts = record.steps.start
    later: list[tuple[float, int]] = []
    found: list[Overtake] = []
    in_order = sorted(record.requests.values(), key=lambda life: -life.request.arrival)
    for _, group in groupby(in_order, key=lambda life: life.request.arrival):
        started: list[tuple[float, int]] = []
        for life in group:
            end = record.end if life.ended_at is None else life.ended_at
            served = end
            if (row := first_row(life.segment_data)) is not None:
                served = starts[row]
                started.append((served, life.request.id))
            if others := bisect_left(later, (served, -1)):
                first, by = later[0]
                found.append(Overtake(life.request.id, by, served - first, others))
        for start in started:
            insort(later, start)
    return sorted(found, key=lambda overtake: (-overtake.seconds, overtake.victim))


def compute_wasted_time(record: RunRecord, table: RunTable) -> WastedTime:
    """Return the wasted GPU time of a run.

    Time of the category ``gone`` does not count as ``dropped`` or ``recompute``.
    """
    log, lives = record.steps, record.requests.values()
    start, end = np.array(log.start), np.array(log.end)
    tokens = np.array(log.prefill_tokens) + np.array(log.decode_seqs)
    per_token = (end - start) / np.maximum(tokens, 1)
    upto = np.concatenate([[0.0], np.cumsum(per_token)])
    # Rows that began after the end of the request.
    ended = np.array([inf if life.ended_at is None else life.ended_at for life in lives])
    after = np.searchsorted(start, ended - NEGLIGIBLE)
    stop = np.maximum(table.first, np.minimum(after[table.owner], table.last + 1))
    gone = table.tokens * (upto[table.last + 1] - upto[stop])
    again = np.where(
        table.kind == DECODE_CODE,
        upto[np.minimum(table.first + table.recomputed, stop)] - upto[table.first],
        np.where(stop > table.first, table.recomputed * per_token[table.first], 0.0),
    )
    dropped = [
        per_token[row]
        for life, limit in zip(lives, after.tolist(), strict=True)
        for row in life.dropped_rows
        if row < limit
    ]
    return WastedTime(_total(gone), fsum(dropped), _total(again), _total(end - start))


def _total(seconds: Floats) -> float:
    """Return the sum without rounding errors of intermediate sums."""
    return fsum(seconds[seconds != 0].tolist())
