"""Check that a custom scheduler uses neither knowledge of the future nor random numbers.

The run is repeated step by step with the same requests, and the results must be equal. In two
further runs, some requests have other output lengths. All decisions must be the same as in the
original run until the first request with a changed length ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import inf, isclose
from pathlib import Path
from typing import Any

from simkv.core.errors import InputError
from simkv.core.request import Request
from simkv.scenario.custom.custom_engine import find_custom_code
from simkv.scenario.custom.scheduler_laws import CheckedScheduler, watched_scheduler
from simkv.scenario.scenario import Scenario
from simkv.sim.run_record import RunRecord
from simkv.sim.simulation import (
    ReplicaSpec,
    ScenarioRun,
    build_replica_specs,
    simulate_scenario,
)
from simkv.workload.clients import Clients
from simkv.workload.workload_section import build_clients

#: Offset of the request ids in runs with other output lengths; a scheduler can therefore not
#: recognize the original requests.
TWIN_ID_OFFSET = 1 << 40


def check_scheduler_run(scenario: Scenario, folder: Path) -> RunRecord:
    """Run a scenario on a single engine and check every call of its custom scheduler.

    Raises LawViolation if the scheduler violates a scheduler law or decides differently in a
    repeated run. Raises InputError if the scenario has a fleet or no custom scheduler.
    """
    if scenario.fleet is not None:
        raise InputError(
            "fleet: not supported, because the check of a scheduler runs a single engine; remove "
            "`fleet`"
        )
    if find_custom_code(scenario.engine) is None:
        raise InputError(
            f"engine.name: {scenario.engine.name} is not a custom scheduler; expected an "
            "engine with `file`"
        )
    replicas = build_replica_specs(scenario, folder)
    run = _run(scenario, replicas)
    scheduler = _watched(run)
    plain = _twin(scenario, replicas)
    watched = _watched(plain)
    if why := _unlike(run.record, plain.record):
        law = "leaps" if scheduler.leapt else "chance"
        raise scheduler.broken(law, why, _first(scheduler.trail, watched.trail))
    for futures in _other_futures(run.record):
        other = _watched(_twin(scenario, replicas, futures, TWIN_ID_OFFSET))
        ours = min(watched.over.get(i, watched.step) for i in futures)
        theirs = min(other.over.get(i + TWIN_ID_OFFSET, other.step) for i in futures)
        until = min(ours, theirs)
        step = _first(watched.trail[:until], other.trail[:until])
        del other
        if (
            step is not None
            and _first(
                watched.trail, _watched(_twin(scenario, replicas, shift=TWIN_ID_OFFSET)).trail
            )
            is None
        ):  # to prove that the changed request ids are not the cause
            what = "decisions depend on the future output lengths of requests"
            raise scheduler.broken("future", what, step)
    return run.record


def _twin(
    scenario: Scenario,
    replicas: Sequence[ReplicaSpec],
    futures: Mapping[int, int] | None = None,
    shift: int = 0,
) -> ScenarioRun:
    """Repeat the run and simulate every step.

    ``futures`` contains new output lengths by request id. ``shift`` is added to all request ids.
    """
    sent = build_clients(scenario.workload, scenario.timeout)
    requests = [_with_future(futures or {}, request, shift) for request in sent.requests]
    after = {
        i + shift: one._replace(before=tuple(before + shift for before in one.before))
        for i, one in sent.after.items()
    }
    others = Clients(requests, after, sent.max_concurrency, sent.max_sessions)
    return _run(scenario, replicas, leaping=False, sent=others)


def _run(scenario: Scenario, replicas: Sequence[ReplicaSpec], **how: Any) -> ScenarioRun:
    """Run the scenario with a new instance of its scheduler and check every call."""
    (replica,) = replicas
    watched = watched_scheduler(replica.engine)
    return simulate_scenario(scenario, replicas, scheduler=watched, **how)


def _other_futures(record: RunRecord) -> Iterator[dict[int, int]]:
    """Yield two sets of new output lengths by request id. Other requests keep their lengths.

    The first set swaps the shortest and the longest outputs. The second set has new lengths for the
    half of the requests that ended last.
    """
    lives = sorted(
        record.requests.values(), key=lambda life: (life.ended_at or inf, life.request.id)
    )
    tokens = {life.request.id: life.request.output_tokens for life in lives}
    if not tokens:
        return
    both = min(tokens.values()) + max(tokens.values())
    yield {i: both - n for i, n in tokens.items()}
    yield {i: 1 + 7919 * (i + 1) % tokens[i] for i in list(tokens)[len(tokens) // 2 :]}


def _with_future(futures: Mapping[int, int], request: Request, shift: int) -> Request:
    tokens = min(futures.get(request.id, request.output_tokens), request.max_tokens)
    return replace(request, id=request.id + shift, output_tokens=tokens)


def _watched(run: ScenarioRun) -> CheckedScheduler:
    scheduler = run.lifetimes[0].engine.scheduler
    assert isinstance(scheduler, CheckedScheduler)
    return scheduler


def _first(ours: Sequence[int], others: Sequence[int]) -> int | None:
    """Return the first step (from 1) with different decisions in two runs, or None."""
    pairs = enumerate(zip(ours, others, strict=False), start=1)
    return next((step for step, (a, b) in pairs if a != b), None)


def _unlike(record: RunRecord, other: RunRecord) -> str:
    """Return the first difference between two records as text, or ""."""
    for i, life in record.requests.items():
        twin = other.requests[i]
        same = (life.outcome, life.tokens) == (twin.outcome, twin.tokens)
        if not same or not isclose(life.ended_at or 0.0, twin.ended_at or 0.0, rel_tol=1e-9):
            return (
                f"request {i}: {life.outcome} at {life.ended_at} s, and {twin.outcome} at "
                f"{twin.ended_at} s when repeated step by step"
            )
    return ""
