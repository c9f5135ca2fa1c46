"""Time at which most requests are in flight, when a failure would affect most requests."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from simkv.metrics.run_result import RunResult
from simkv.sim.run_record import RequestRecord


def find_peak_load(result: RunResult) -> dict[str, Any]:
    """Return the time of the most requests in flight, their number, and the busiest replica.

    ``at_s`` is the first such time (s), just after the arrival that caused it. ``replica`` is the
    index of the replica with the most requests at that time; among equal ones it is the first. It
    is 0 without a fleet.
    """
    at, most = _most(result.record.requests.values())
    by_replica: dict[int, int] = {}
    for lifetime in result.fleet.lifetimes if result.fleet else ():
        here = sum(_is_there(life, at) for life in lifetime.engine.record.requests.values())
        by_replica[lifetime.replica] = by_replica.get(lifetime.replica, 0) + here
    replica = max(by_replica, key=lambda one: (by_replica[one], -one), default=0)
    return {"at_s": at, "in_flight": most, "replica": replica}


def _most(lives: Collection[RequestRecord]) -> tuple[float, int]:
    """Return the first time (s) with the most requests in flight, and their number.

    A request that ends at the time of an arrival is not counted together with the new request.
    """
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
