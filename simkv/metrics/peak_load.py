"""The moment at which a run had the most requests in flight: when a failure would hit most."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from simkv.metrics.run_result import RunResult
from simkv.sim.run_record import RequestRecord


def find_peak_load(result: RunResult) -> dict[str, Any]:
    """When the most requests were in flight, how many, and which replica of a fleet had the most.

    ``at_s`` is the first such moment (s), just after the arrival that made it so; ``replica`` is 0
    without a fleet, and of equals the first.
    """
    at, most = _most(result.record.requests.values())
    by_replica: dict[int, int] = {}
    for stint in result.fleet.lifetimes if result.fleet else ():
        here = sum(_is_there(life, at) for life in stint.engine.record.requests.values())
        by_replica[stint.replica] = by_replica.get(stint.replica, 0) + here
    replica = max(by_replica, key=lambda one: (by_replica[one], -one), default=0)
    return {"at_s": at, "in_flight": most, "replica": replica}


def _most(lives: Collection[RequestRecord]) -> tuple[float, int]:
    """The first moment with the most lives, and how many; ends come before arrivals."""
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
