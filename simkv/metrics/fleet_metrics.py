"""Compute metrics of a fleet (a deployment with several replicas) and the peak load of a run."""

from __future__ import annotations

from collections.abc import Collection
from math import fsum
from typing import Any

from simkv.core.outcome import Outcome
from simkv.metrics.run_metrics import prefix_hits, ttft
from simkv.metrics.run_result import RunResult
from simkv.sim.fleet.disaggregated_fleet import DisaggregatedFleet
from simkv.sim.fleet.fleet import Fleet
from simkv.sim.fleet.replica_lifetime import ReplicaLifetime
from simkv.sim.run_record import RequestRecord


def fleet_figures(fleet: Fleet, end: float) -> dict[str, Any]:
    """Return the entries of ``summary.json`` for a fleet whose run ended at ``end`` (s).

    ``mean_in_system`` is the mean number of requests in the fleet. ``imbalance`` is the largest
    busy time of a replica divided by the mean. ``replica_s`` is the sum of the replica lifetimes
    (s). ``retries`` is the number of requests sent again after a replica failed.
    """
    replicas = [replica_figures(fleet, replica, end) for replica in range(fleet.size)]
    busy = [row["busy_s"] for row in replicas]
    mean = fsum(busy) / len(busy)
    transfers = _transfers(fleet) if isinstance(fleet, DisaggregatedFleet) else {}
    return {
        "replicas": len(replicas),
        "mean_in_system": fleet.in_system_s / end if end > 0.0 else 0.0,
        "imbalance": max(busy) / mean if mean > 0.0 else 1.0,
        "replica_s": fsum(row["there_s"] for row in replicas),
        "retries": fleet.retries,
        **transfers,
        "by_replica": replicas,
    }


def _transfers(fleet: DisaggregatedFleet) -> dict[str, Any]:
    """Return the number, bytes, mean wait (ms) and mean duration (ms) of KV transfers."""
    done = [
        h
        for h in fleet.handovers.values()
        if h.requested_at is not None and h.arrived_at is not None
    ]
    waits = [h.requested_at - h.prefilled_at for h in done if h.requested_at is not None]
    takes = [
        h.arrived_at - h.requested_at
        for h in done
        if h.requested_at is not None and h.arrived_at is not None
    ]
    assert fleet.rules.kv_transfer is not None
    size = fleet.rules.kv_transfer.bytes_per_token
    return {
        "transfers": len(done),
        "transferred_bytes": sum(handover.tokens for handover in done) * size,
        "mean_wait_for_blocks_ms": 1000.0 * fsum(waits) / len(waits) if waits else 0.0,
        "mean_transfer_ms": 1000.0 * fsum(takes) / len(takes) if takes else 0.0,
    }


def replica_figures(fleet: Fleet, replica: int, end: float) -> dict[str, Any]:
    """Return the metrics of one replica in a run that ended at ``end`` (s).

    ``hit_rate`` is the fraction of prompt tokens found in the prefix cache. ``mean_ttft_ms``
    includes unfinished requests, and is 0 without a first token.
    """
    lifetimes = [lifetime for lifetime in fleet.lifetimes if lifetime.replica == replica]
    lives = [life for lifetime in lifetimes for life in lifetime.engine.record.requests.values()]
    busy = fsum(_busy(lifetime, end) for lifetime in lifetimes)
    there = fsum((end if s.end is None else s.end) - s.start for s in lifetimes)
    decodes = isinstance(fleet, DisaggregatedFleet) and any(
        fleet.decodes(lifetime) for lifetime in lifetimes
    )
    hits, taken_in = (0, 0) if decodes else prefix_hits(lives)
    first_tokens = [s for life in lives if (s := ttft(life)) is not None]
    return {
        "replica": replica,
        "requests": len(lives),
        "finished": sum(life.outcome is Outcome.FINISHED for life in lives),
        "there_s": there,
        "busy_s": busy,
        "utilisation": busy / there if there > 0.0 else 0.0,
        "output_tokens": sum(life.tokens for life in lives),
        "mean_ttft_ms": 1000.0 * fsum(first_tokens) / len(first_tokens) if first_tokens else 0.0,
        "preemptions": sum(len(life.preempted_at) for life in lives),
        "recomputed_tokens": sum(life.recomputed_tokens for life in lives),
        "hit_rate": hits / taken_in if taken_in else 0.0,
    }


def _busy(lifetime: ReplicaLifetime, end: float) -> float:
    """Return the busy seconds of a replica, up to the end of its lifetime or of the run."""
    log, until = lifetime.engine.record.steps, end if lifetime.end is None else lifetime.end
    busy = fsum(log.end) - fsum(log.start)
    # An asynchronous engine has already scheduled the next step when its lifetime or the run ends.
    for start, stop in zip(reversed(log.start), reversed(log.end), strict=True):
        if stop <= until:
            break
        busy -= stop - max(start, until)
    return busy


def find_peak_load(result: RunResult) -> dict[str, Any]:
    """Return the peak number of requests in flight, its time, and the busiest replica.

    ``at_s`` is the first time (s) of the peak. ``replica`` is the index of the replica with the
    most requests at the peak, or 0 without a fleet.
    """
    at, most = _most(result.record.requests.values())
    by_replica: dict[int, int] = {}
    for lifetime in result.fleet.lifetimes if result.fleet else ():
        here = sum(_is_there(life, at) for life in lifetime.engine.record.requests.values())
        by_replica[lifetime.replica] = by_replica.get(lifetime.replica, 0) + here
    replica = max(by_replica, key=lambda one: (by_replica[one], -one), default=0)
    return {"at_s": at, "in_flight": most, "replica": replica}


def _most(lives: Collection[RequestRecord]) -> tuple[float, int]:
    """Return the first time (s) with the most requests in flight, and their number."""
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
