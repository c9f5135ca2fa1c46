# mypyc: compile
"""Final outcomes of requests that are unresolved at the end of a run."""

from __future__ import annotations

from simkv.core.outcome import Outcome
from simkv.core.request import Request
from simkv.sim.run_record import RunRecord


def record_cut_off(record: RunRecord, request: Request) -> None:
    """Record a request that never arrived as cut off."""
    life = record.arrive(request)
    life.outcome, life.reason = Outcome.CUT_OFF, "it was not sent before the run ended"
    life.ended_at = request.arrival


def assign_outcomes(record: RunRecord, horizon: float | None) -> None:
    """Assign an outcome to each unresolved request.

    If the engine halted before a client gave up, the halt is the cause: the request is stalled.
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
            life.outcome, life.reason = Outcome.CUT_OFF, "the run reached its horizon"
        elif life.outcome is None:
            life.outcome, life.reason = Outcome.LOST, "the engine went idle without finishing it"
        if life.ended_at is None:
            life.ended_at = record.end
