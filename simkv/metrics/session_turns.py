"""Turns of sessions: what each request waited for, and how its time was spent.

sessions = list_sessions(record, clients)  # by arrival; a session's number is its index
turns = list_turns(record, clients, sessions[3])
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf

from simkv.core.outcome import Outcome
from simkv.sim.run_record import RequestRecord, RunRecord
from simkv.workload.clients import Clients, Dependency, find_sessions


@dataclass(frozen=True, slots=True)
class SessionTurn:
    """A request of a session. Times are in seconds, and None if the request did not get that far.

    ``turn`` is the number of the turn, from 1. ``before`` contains the requests that it waited for.
    ``arrived`` is the arrival at the client, after ``tool_time`` and ``think_time``, or the start
    of the session if ``max_sessions`` delayed it. ``waited`` is the time until the first step, and
    ``ended`` is the end. ``cached`` is the number of prompt
    tokens from the prefix cache. ``recomputed`` is the number of prompt tokens that an earlier turn
    had already computed. ``critical`` is true on the critical path of the session.
    """

    request: int
    turn: int
    before: tuple[int, ...]
    tool_time: float
    think_time: float
    arrived: float | None
    waited: float | None
    ended: float | None
    cached: int
    recomputed: int
    critical: bool


def list_sessions(record: RunRecord, clients: Clients) -> list[list[RequestRecord]]:
    """Return the requests of every session, in order of the first arrival at a client.

    A request without dependencies forms its own session.
    """
    of = find_sessions(clients.after)
    sessions: dict[int, list[RequestRecord]] = {}
    for i, life in record.requests.items():
        sessions.setdefault(of.get(i, i), []).append(life)
    return sorted(
        sessions.values(),
        key=lambda lives: min(clients.arrived.get(life.request.id, inf) for life in lives),
    )


def list_turns(
    record: RunRecord, clients: Clients, lives: Sequence[RequestRecord]
) -> list[SessionTurn]:
    """Return the turns of a session in order of arrival. Requests that were not sent are last."""
    numbers = number_turns(clients)
    critical = {life.request.id for life in find_critical_path(record, clients, lives)}
    turns = []
    for life in lives:
        i = life.request.id
        dependency = clients.after.get(i)
        arrived = clients.started.get(i)
        start = find_first_step(record, life)
        sent = i in clients.sent
        turns.append(
            SessionTurn(
                i,
                numbers[i],
                dependency.before if dependency else (),
                dependency.tool_time if dependency else 0.0,
                dependency.think_time if dependency else 0.0,
                arrived,
                None if start is None or arrived is None else start - arrived,
                life.ended_at if sent else None,
                life.chunks[0].context if life.chunk_rows else 0,
                count_resume_tax(record, life),
                i in critical,
            )
        )
    return sorted(
        turns, key=lambda one: (inf if one.arrived is None else one.arrived, one.turn, one.request)
    )


def find_start_wait(clients: Clients, lives: Iterable[RequestRecord]) -> float | None:
    """Return the time (s) from the first arrival of a session to its start under ``max_sessions``,
    or None if it did not start.
    """
    numbers = [life.request.id for life in lives if life.request.id in clients.started]
    if not numbers:
        return None
    first = min(clients.started[i] for i in numbers)
    return first - min(clients.arrived[i] for i in numbers)


def number_turns(clients: Clients) -> dict[int, int]:
    """Return the turn of each request: 1, or one more than the highest turn that it waits for."""
    turns: dict[int, int] = {}
    for request in clients.requests:  # a request comes after the requests that it waits for
        dependency = clients.after.get(request.id)
        before = dependency.before if dependency else ()
        turns[request.id] = 1 + max((turns[i] for i in before), default=0)
    return turns


def find_critical_path(
    record: RunRecord, clients: Clients, lives: Iterable[RequestRecord]
) -> list[RequestRecord]:
    """Return the requests that determine the end of a session, in order.

    The last request is the one that ended last. Each earlier request is the one whose answer the
    next request waited for.
    """
    arrived = [life for life in lives if life.request.id in clients.arrived]
    if not arrived:
        return []
    answered = [life for life in arrived if life.outcome is not Outcome.CANCELLED]
    path = [max(answered or arrived, key=find_end)]
    while dependency := clients.after.get(path[-1].request.id):
        path.append(find_awaited(record, dependency))
    return path[::-1]


def find_awaited(record: RunRecord, dependency: Dependency) -> RequestRecord:
    """Return the request whose answer ended the wait: the last one, or the first one if one
    suffices.
    """
    lives = [record.requests[i] for i in dependency.before]
    if dependency.first_wins:
        return min((x for x in lives if x.outcome is Outcome.FINISHED), key=find_end)
    return max(lives, key=find_end)


def find_end(life: RequestRecord) -> float:
    """Return the time (s) at which an ended request ended."""
    assert life.ended_at is not None
    return life.ended_at


def find_first_step(record: RunRecord, life: RequestRecord) -> float | None:
    """Return the start of a request's first step (s), or None if it did not run."""
    return record.steps.start[life.segments[0].first] if life.segment_data else None


def count_resume_tax(record: RunRecord, life: RequestRecord) -> int:
    """Return the number of prompt tokens that were computed again although an earlier turn had
    computed them.
    """
    resumed = record.resumed.get(life.request.id)
    if resumed is None or not life.chunk_rows:
        return 0
    return max(resumed.tokens - life.chunks[0].context, 0)


def find_slowest_session(record: RunRecord, clients: Clients) -> int:
    """Return the number of the session with the longest time from its start to its last end."""

    def lasted(lives: Sequence[RequestRecord]) -> float:
        started = [clients.started.get(life.request.id, inf) for life in lives]
        return max(map(find_end, lives)) - min(started)

    spans = [lasted(lives) for lives in list_sessions(record, clients)]
    return spans.index(max(spans))
