"""Metrics of sessions: duration, shares of time, prefix cache hits by turn, and recomputed
prefixes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Container, Iterable
from typing import Any

import numpy as np

from simkv.core.outcome import SERVED, Outcome
from simkv.metrics.run_metrics import Floats, Samples, prefix_hits
from simkv.metrics.session_turns import (
    count_resume_tax,
    find_awaited,
    find_critical_path,
    find_end,
    find_first_step,
    find_start_wait,
    list_sessions,
    number_turns,
)
from simkv.sim.run_record import RequestRecord, RunRecord
from simkv.workload.clients import Clients

#: Upper limits of the classes of idle time, in seconds.
IDLE_TIMES_S = (1.0, 10.0, 60.0, 600.0)


def session_figures(
    record: RunRecord, sent: Clients, deadline: float | None = None, warm_up: int = 0
) -> dict[str, Any]:
    """Return the entry ``sessions`` of ``summary.json`` for a workload with dependent requests.

    Times start at the arrival at the client, or at the start of the session if it waited for it.
    ``start_wait_ms`` is the wait of started sessions for their start; it exists only with
    ``max_sessions``. ``makespan_ms`` is the duration of finished sessions until the last answer.
    ``shares`` contains the percentages of waiting, model, tools and think time on the critical path
    of finished sessions. ``turn_ms`` is the time until the last token of finished requests.

    ``resume_tax_tokens`` is the number of prompt tokens that were computed again although an
    earlier turn had computed them. ``resume_tax`` is their percentage of all prompt tokens.

    ``by_turn`` contains the prefix cache hit rate by turn. ``by_idle_time`` contains the hit rate
    by idle time, from the awaited answer to the arrival of the next request.

    The first ``warm_up`` sessions are excluded. ``met_deadline`` is the number of finished sessions
    with a makespan of at most ``deadline`` (s), and ``met_deadline_share`` is their percentage of
    all sessions.
    """
    sessions = list_sessions(record, sent)[warm_up:]
    requests = [life for lives in sessions for life in lives]
    finished = [lives for lives in sessions if all(life.outcome in SERVED for life in lives)]
    paths = np.array([_critical_path(record, sent, lives) for lives in finished]).reshape(-1, 4)
    spans = paths.sum(axis=1)
    total = float(spans.sum())
    shares = (100.0 * paths.sum(axis=0) / total).tolist() if total else [0.0] * 4
    tax = sum(count_resume_tax(record, life) for life in requests)
    queried = prefix_hits(requests)[1]
    turns = [
        find_end(life) - sent.started[life.request.id]
        for life in requests
        if life.outcome is Outcome.FINISHED
    ]
    return {
        "count": len(sessions),
        "finished": len(finished),
        **({} if deadline is None else _deadline_figures(spans, deadline, len(sessions))),
        **_start_waits(sent, sessions),
        "makespan_ms": _statistics_ms(spans),
        "turn_ms": _statistics_ms(np.array(turns)),
        "shares": dict(zip(("waiting", "model", "tools", "think"), shares, strict=True)),
        "by_turn": _by_turn(record, sent, {life.request.id for life in requests}),
        "by_idle_time": _by_idle_time(record, sent, requests),
        "resume_tax_tokens": tax,
        "resume_tax": 100.0 * tax / queried if queried else 0.0,
    }


def _deadline_figures(spans: Floats, deadline: float, count: int) -> dict[str, float]:
    """Return the number of sessions that met the deadline, and their percentage of ``count``."""
    met = int((spans <= deadline).sum())
    return {"met_deadline": met, "met_deadline_share": 100.0 * met / count if count else 0.0}


def _start_waits(sent: Clients, sessions: Iterable[list[RequestRecord]]) -> dict[str, Any]:
    """Return the statistics of the wait of started sessions for their start under
    ``max_sessions``.
    """
    waits = [find_start_wait(sent, lives) for lives in sessions]
    started = [wait for wait in waits if wait is not None]
    if sent.max_sessions is None or not started:
        return {}
    return {"start_wait_ms": _statistics_ms(np.array(started))}


def _statistics_ms(seconds: Floats) -> dict[str, float]:
    return Samples(seconds, np.ones(len(seconds), np.int64)).statistics_ms()


def _critical_path(
    record: RunRecord, sent: Clients, lives: Iterable[RequestRecord]
) -> tuple[float, float, float, float]:
    """Return the seconds of waiting, model, tools and think time on the critical path of a
    session.
    """
    waiting = model = tools = think = 0.0
    before: RequestRecord | None = None
    for life in find_critical_path(record, sent, lives):
        i = life.request.id
        first_step = find_first_step(record, life)
        assert first_step is not None
        waiting += first_step - sent.started[i]
        model += find_end(life) - first_step
        if before is not None:
            tools += sent.after[i].tool_time
            pause = sent.arrived[i] - find_end(before)
            think += max(pause - sent.after[i].tool_time, 0.0)  # rounding can make it negative
        before = life
    return waiting, model, tools, think


def _by_turn(record: RunRecord, sent: Clients, counted: Container[int]) -> list[dict[str, float]]:
    """Return the number of requests in ``counted`` and their prefix cache hit rate (%), by turn."""
    lives: dict[int, list[RequestRecord]] = {}
    for i, turn in number_turns(sent).items():
        some = lives.setdefault(turn, [])
        if i in counted:
            some.append(record.requests[i])
    rows = []
    for turn, some in sorted(lives.items()):
        hits, queried = prefix_hits(some)
        rate = 100.0 * hits / queried if queried else 0.0
        rows.append({"turn": turn, "requests": len(some), "hit_rate": rate})
    return rows


def _by_idle_time(
    record: RunRecord, sent: Clients, requests: Iterable[RequestRecord]
) -> list[dict[str, float | None]]:
    """Return the number of dependent requests and their prefix cache hit rate (%), by class of idle
    time.

    ``up_to_s`` is the upper limit of a class, or None for the last class. Empty classes are
    omitted.
    """
    classes: list[list[RequestRecord]] = [[] for _ in range(len(IDLE_TIMES_S) + 1)]
    for life in requests:
        dependency = sent.after.get(life.request.id)
        if dependency is None or life.request.id not in sent.arrived:
            continue
        idle = sent.arrived[life.request.id] - find_end(find_awaited(record, dependency))
        classes[bisect_left(IDLE_TIMES_S, idle)].append(life)
    rows: list[dict[str, float | None]] = []
    for limit, some in zip((*IDLE_TIMES_S, None), classes, strict=True):
        hits, queried = prefix_hits(some)
        if some:
            rate = 100.0 * hits / queried if queried else 0.0
            rows.append({"up_to_s": limit, "requests": len(some), "hit_rate": rate})
    return rows
