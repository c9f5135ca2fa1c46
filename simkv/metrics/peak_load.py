"""Time of peak load in a run, when a failure would affect most requests."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from simkv.metrics.run_result import RunResult
from simkv.sim.run_record import RequestRecord


def find_peak_load(result: RunResult) -> dict[str, Any]:
    """Return the time and number of most requests in flight, and the busiest replica then.

    ``at_s`` is the first such time (s), just after the arrival that caused it. ``replica`` is 0
    without a fleet; among equal replicas it is the first.
    """
    at, most = _most(result.record.requests.values())
    by_replica: dict[int, int] = {}
    for lifetime in result.fleet.lifetimes if result.fleet else ():
        here = sum(_is_there(life, at) for life in lifetime.engine.record.requests.values())
        by_replica[lifetime.replica] = by_replica.get(lifetime.replica, 0) + here
    replica = max(by_replica, key=lambda one: (by_replica[one], -one), default=0)
    return {"at_s": at, "in_flight": most, "replica": replica}


def _most(lives: Collection[RequestRecord]) -> tuple[float, int]:
    """Return the first time with the most requests, and their number; ends precede arrivals."""
    changes = [(life.request.arrival, 1) for life in lives]
    changes += [(life.ended_at, -1) for life in lives if life.ended_at is not None]
    at, now, most = 0.0, 0, 0
    for time, change in sorted(changes):
        now += change
        if now > most:
            at, most = time, now
    return at, most


def _is_there(life: RequestRecord, at: float) -> bool:
    return life.request.arrival <= at and (life.ended_at is None or life.ended_at > at)
