"""Checks that the wait ledger sums exactly to every request's E2E."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise
from math import inf, isclose

from simkv.core.outcome import Outcome
from simkv.explain.computed_runs import compute_runs
from simkv.explain.ledger_kinds import COMPUTE_KINDS, NEGLIGIBLE, LedgerKind, LedgerSegment
from simkv.explain.wait_ledger import build_ledger
from simkv.metrics.run_metrics import e2e
from simkv.sim.run_record import RequestRecord, RunRecord


def assert_ledger(record: RunRecord, *, with_reasons: bool = True) -> None:
    """Check that every second of every request is assigned to one correct category.

    ``with_reasons`` means that the scheduler gives a reason for each wait.
    """
    intervals = build_ledger(record)
    assert intervals.keys() == record.requests.keys()
    for i, life in record.requests.items():
        tiles, kinds = intervals[i], {tile.kind for tile in intervals[i]}
        assert_sums(life, tiles)
        assert_steps_agree(record, life, tiles)
        if not record.engine_halt:  # engines that crash had admitted a request and lost it
            reasons = LedgerKind.QUEUED not in kinds or not with_reasons
            assert reasons, "a scheduler gave no reason for a wait"
            assert LedgerKind.STALLED not in kinds
        if not life.preempted_at:
            assert not kinds & {LedgerKind.PREEMPTED, LedgerKind.RECOMPUTE}
        assert_preempted_until_it_runs_again(record, life, tiles)


def assert_sums(life: RequestRecord, tiles: list[LedgerSegment]) -> None:
    """Check that the intervals tile the duration of a request, so that their exact sum is its
    length.
    """
    arrival, end = life.request.arrival, life.ended_at
    assert end is not None
    if end <= arrival:
        assert tiles == []
        return
    assert sum(Fraction(tile.end) - Fraction(tile.start) for tile in tiles) == (
        Fraction(end) - Fraction(arrival)
    )
    assert (tiles[0].start, tiles[-1].end) == (arrival, end)
    for a, b in pairwise(tiles):
        assert a.end == b.start
        assert a.kind is not b.kind
    assert all(tile.seconds > 0 for tile in tiles)
    if life.outcome is Outcome.FINISHED:
        assert isclose(sum(tile.seconds for tile in tiles), e2e(life) or 0.0, rel_tol=1e-9)


def assert_steps_agree(record: RunRecord, life: RequestRecord, tiles: list[LedgerSegment]) -> None:
    """Check that a request is served exactly in the steps that compute for it."""
    end, log = life.ended_at, record.steps
    assert end is not None
    steps = sum(
        max(min(log.end[row], end) - log.start[row], 0.0)
        for computed in compute_runs(life)
        for row in range(computed.first, computed.last + 1)
    )
    served = sum(tile.seconds for tile in tiles if tile.kind in COMPUTE_KINDS)
    if record.engine_halt is None:
        assert isclose(served, steps, rel_tol=1e-9, abs_tol=len(log) * NEGLIGIBLE)
    assert sum(computed.recomputed for computed in compute_runs(life)) == life.recomputed_tokens


def assert_preempted_until_it_runs_again(
    record: RunRecord, life: RequestRecord, tiles: Sequence[LedgerSegment]
) -> None:
    """Check that a request is preempted from the loss of its KV until it runs again, except during
    a step in flight.
    """
    log, computed = record.steps, list(compute_runs(life))
    for at, row in zip(life.preempted_at, life.preempted_rows, strict=True):
        before = [run for run in computed if run.first < row]
        again = next((max(run.first, row) for run in computed if run.last >= row), None)
        start = max(at, log.end[min(before[-1].last, row - 1)]) if before else at
        end = inf if again is None else log.decided[again]
        for tile in tiles:
            if min(tile.end, end) - max(tile.start, start) > 2 * NEGLIGIBLE:
                assert tile.kind in (LedgerKind.PREEMPTED, LedgerKind.STALLED)
