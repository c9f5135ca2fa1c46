"""How requests end that nothing has ended: when a run is over, each of them has an outcome."""

from __future__ import annotations

from simkv.core.outcome import Outcome
from simkv.core.request import Request
from simkv.sim.run_record import RunRecord


def record_cut_off(record: RunRecord, request: Request) -> None:
    """Enter a request that never came."""
    life = record.arrive(request)
    life.outcome, life.reason = Outcome.CUT_OFF, "its turn did not come"
    life.ended_at = request.arrival


def assign_outcomes(record: RunRecord, horizon: float | None) -> None:
    """Give the requests that nothing resolved their outcome.

    Where the engine had stopped for good before a client gave up, the stop is the cause.
    """
    stop = record.engine_halt
    for life in record.requests.values():
        waited_for_nothing = (
            stop is not None
            and life.outcome is Outcome.STARVED
            and life.ended_at is not None
            and life.ended_at >= stop.since
        )
        if waited_for_nothing or (stop and life.outcome is None):
            assert stop is not None
            life.outcome, life.reason = Outcome.STALLED, f"{stop.kind}: {stop.why}"
        elif life.outcome is None and horizon is not None:
            life.outcome, life.reason = Outcome.CUT_OFF, "the horizon came first"
        elif life.outcome is None:
            life.outcome, life.reason = Outcome.LOST, "the engine went idle without it"
        if life.ended_at is None:
            life.ended_at = record.end
