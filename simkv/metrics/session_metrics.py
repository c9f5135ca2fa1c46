"""Metrics of sessions: duration, shares of time, prefix cache hits by turn, and recomputed prefixes
(the resume tax).
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from math import inf
from typing import Any

import numpy as np

from simkv.core.outcome import Outcome
from simkv.metrics.run_metrics import Floats, Samples, prefix_hits
from simkv.sim.run_record import RequestRecord, RunRecord
from simkv.workload.clients import Clients, find_sessions


def session_figures(
    record: RunRecord, sent: Clients, deadline: float | None = None, warm_up: int = 0
) -> dict[str, Any]:
    """Return the entry ``sessions`` of ``summary.json``, for a workload whose requests wait for
    answers.

    ``makespan_ms`` is the time from the arrival of a session's first request at its client until
    the last answer. ``shares`` divides this time, along the critical path, into percentages of
    waiting until the first step, model, tools and think time. These two metrics cover only finished
    sessions. A request that waits for no other request is in turn 1. ``resume_tax_tokens`` are
    prompt tokens that an earlier request of the session had computed in full blocks, and that were
    computed again; ``resume_tax`` is their percentage of the prompt tokens. ``turn_ms`` is the time
    from the arrival of a request at its client until its last token, for finished requests.

    The first ``warm_up`` sessions, by arrival, are excluded from all metrics. ``met_deadline``
    counts finished sessions whose makespan is at most ``deadline`` (s); ``met_deadline_share`` is
    their percentage of all counted sessions. These two metrics are missing without a deadline.
    """
    sessions = _counted_sessions(record, sent, warm_up)
    requests = [life for lives in sessions for life in lives]
    finished = [
        lives for lives in sessions if all(life.outcome is Outcome.FINISHED for life in lives)
    ]
    paths = np.array([_critical_path(record, sent, lives) for lives in finished]).reshape(-1, 4)
    spans = paths.sum(axis=1)
    total = float(spans.sum())
    shares = (100.0 * paths.sum(axis=0) / total).tolist() if total else [0.0] * 4
    tax = sum(_resume_tax(record, life) for life in requests)
    queried = prefix_hits(requests)[1]
    turns = [
        _end(life) - sent.arrived[life.request.id]
        for life in requests
        if life.outcome is Outcome.FINISHED
    ]
    return {
        "count": len(sessions),
        "finished": len(finished),
        **({} if deadline is None else _deadline_figures(spans, deadline, len(sessions))),
        "makespan_ms": _statistics_ms(spans),
        "turn_ms": _statistics_ms(np.array(turns)),
        "shares": dict(zip(("waiting", "model", "tools", "think"), shares, strict=True)),
        "by_turn": _by_turn(record, sent, {life.request.id for life in requests}),
        "resume_tax_tokens": tax,
        "resume_tax": 100.0 * tax / queried if queried else 0.0,
    }


def _counted_sessions(record: RunRecord, sent: Clients, warm_up: int) -> list[list[RequestRecord]]:
    """Return the requests of every session but the first ``warm_up`` by arrival."""
    of = find_sessions(sent.after)
    sessions: dict[int, list[RequestRecord]] = {}
    for i, life in record.requests.items():
        sessions.setdefault(of.get(i, i), []).append(life)
    ordered = sorted(
        sessions.values(),
        key=lambda lives: min(sent.arrived.get(life.request.id, inf) for life in lives),
    )
    return ordered[warm_up:]


def _deadline_figures(spans: Floats, deadline: float, count: int) -> dict[str, float]:
    """Return the number of sessions within the deadline, and their percentage of ``count``."""
    met = int((spans <= deadline).sum())
    return {"met_deadline": met, "met_deadline_share": 100.0 * met / count if count else 0.0}


def _statistics_ms(seconds: Floats) -> dict[str, float]:
    return Samples(seconds, np.ones(len(seconds), np.int64)).statistics_ms()


def _critical_path(
    record: RunRecord, sent: Clients, lives: Iterable[RequestRecord]
) -> tuple[float, float, float, float]:
    """Return the seconds of waiting, model, tools and think time before the last answer."""
    life = max(lives, key=_end)
    waiting = model = tools = think = 0.0
    while True:
        i = life.request.id
        first_step = record.steps.start[life.segments[0].first]
        waiting += first_step - sent.arrived[i]
        model += _end(life) - first_step
        if i not in sent.after:
            return waiting, model, tools, think
        dependency = sent.after[i]
        life = max((record.requests[before] for before in dependency.before), key=_end)
        tools += dependency.tool_time
        think += sent.arrived[i] - _end(life) - dependency.tool_time


def _end(life: RequestRecord) -> float:
    assert life.ended_at is not None
    return life.ended_at


def _by_turn(record: RunRecord, sent: Clients, counted: Container[int]) -> list[dict[str, float]]:
    """Return the number of counted requests and their prefix cache hit rate (%) by turn."""
    turns: dict[int, int] = {}
    lives: list[list[RequestRecord]] = []
    # each request comes after the requests whose answers it waits for
    for request in sent.requests:
        dependency = sent.after.get(request.id)
        turn = 0 if dependency is None else 1 + max(turns[i] for i in dependency.before)
        turns[request.id] = turn
        if turn == len(lives):
            lives.append([])
        if request.id in counted:
            lives[turn].append(record.requests[request.id])
    rows = []
    for turn, some in enumerate(lives, start=1):
        hits, queried = prefix_hits(some)
        rate = 100.0 * hits / queried if queried else 0.0
        rows.append({"turn": turn, "requests": len(some), "hit_rate": rate})
    return rows


def _resume_tax(record: RunRecord, life: RequestRecord) -> int:
    """Return the number of prompt tokens computed again although an earlier request of the session
    had computed their KV.
    """
    resumed = record.resumed.get(life.request.id)
    if resumed is None or not life.chunk_rows:
        return 0
    return max(resumed.tokens - life.chunks[0].context, 0)
