"""Rows of the session plot: the turns of a session in order of time, and the gaps between them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from simkv.metrics.run_result import RunResult
from simkv.metrics.session_turns import find_awaited, find_end, list_sessions
from simkv.report.chart_data import TickScale
from simkv.report.plot_style import sort_requests_by_arrival
from simkv.sim.run_record import RequestRecord, RunRecord
from simkv.workload.clients import Clients

#: Maximum number of turns in the view; at least one session is shown.
MAX_TURNS = 600


def build_session_rows(result: RunResult, ticks: TickScale) -> list[dict[str, Any]]:
    """Return the slowest sessions in order of arrival, or an empty list without dependent requests.

    ``turns`` contains one entry per request: its index in order of arrival, its row, and three
    times in ticks. The times are the end of the answer that the request waited for, the duration of
    its tool calls, and its arrival at the client, or the start of its session if it waited for it.
    ``rows`` is the number of rows; turns that overlap in time are in different rows.
    """
    record, clients = result.record, result.run.clients
    if not clients.after:
        return []
    sessions = [
        (number, turns)
        for number, lives in enumerate(list_sessions(record, clients))
        if (turns := [life for life in lives if life.request.id in clients.sent])
    ]
    places = {life.request.id: i for i, life in enumerate(sort_requests_by_arrival(record))}
    return [
        {"number": number, **_place_turns(record, clients, turns, places, ticks)}
        for number, turns in sorted(_slowest(clients, sessions))
    ]


def _slowest(
    clients: Clients, sessions: Sequence[tuple[int, list[RequestRecord]]]
) -> list[tuple[int, list[RequestRecord]]]:
    def span(turns: Sequence[RequestRecord]) -> float:
        first = min(clients.started[life.request.id] for life in turns)
        return max(map(find_end, turns)) - first

    shown: list[tuple[int, list[RequestRecord]]] = []
    left = MAX_TURNS
    for number, turns in sorted(sessions, key=lambda one: (-span(one[1]), one[0])):
        if shown and len(turns) > left:
            break
        shown.append((number, turns))
        left -= len(turns)
    return shown


def _place_turns(
    record: RunRecord,
    clients: Clients,
    turns: Sequence[RequestRecord],
    places: dict[int, int],
    ticks: TickScale,
) -> dict[str, Any]:
    placed = []
    free: list[float] = []  # time from which each row is free
    for life in sorted(turns, key=lambda life: (clients.started[life.request.id], life.request.id)):
        i = life.request.id
        arrived, tools = clients.started[i], 0.0
        since = arrived
        if dependency := clients.after.get(i):
            since = find_end(find_awaited(record, dependency))
            tools = dependency.tool_time
        row = next((n for n, time in enumerate(free) if time <= since), len(free))
        free[row : row + 1] = [find_end(life)]
        placed.append([places[i], row, ticks.of(since), ticks.of(tools), ticks.of(arrived)])
    return {"rows": len(free), "turns": placed}
