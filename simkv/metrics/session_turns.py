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
    """A request of a session; times are in seconds.

    A request that waits for no other request is in ``turn`` 1. ``before`` contains the requests
    that it waited for. The request arrived at its client at ``arrived``, after ``tool_time`` and
    ``think_time``; ``waited`` is the time until its first step, and ``ended`` its end. These times
    are None for a request that was not sent or did not run. Of its prompt, ``cached`` tokens came
    from the prefix cache, and ``recomputed`` tokens were computed again although an earlier turn
    had computed them. ``critical`` states whether the request is on the critical path of its
    session.
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

    A request without dependencies on other requests is a session of its own.
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
    """Return the turns of a session in order of arrival; requests that were not sent are last."""
    numbers = number_turns(clients)
    critical = {life.request.id for life in find_critical_path(record, clients, lives)}
    turns = []
    for life in lives:
        i = life.request.id
        dependency = clients.after.get(i)
        arrived = clients.arrived.get(i)
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


def number_turns(clients: Clients) -> dict[int, int]:
    """Return the turn of each request. It is one more than the highest turn of the requests that it
    waits for, or 1 if it waits for none.
    """
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

    The last request of the path is the request that ended last; cancelled requests and requests
    that arrived at no client are ignored. Each earlier request of the path is the request whose end
    the next one waited for: the last one to end or, if one answer is enough, the first one to end.
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
    """Return the request whose answer completed the wait: the last answer or, if one answer is
    enough, the first one.
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
    already computed their KV.
    """
    resumed = record.resumed.get(life.request.id)
    if resumed is None or not life.chunk_rows:
        return 0
    return max(resumed.tokens - life.chunks[0].context, 0)


def find_slowest_session(record: RunRecord, clients: Clients) -> int:
    """Return the number of the session with the longest time from first arrival to last end."""

    def lasted(lives: Sequence[RequestRecord]) -> float:
        arrived = [clients.arrived.get(life.request.id, inf) for life in lives]
        return max(map(find_end, lives)) - min(arrived)

    spans = [lasted(lives) for lives in list_sessions(record, clients)]
    return spans.index(max(spans))
