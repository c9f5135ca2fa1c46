"""Tests of sessions as graphs: sub-agents, tool times, compaction, and lanes of sessions."""

from __future__ import annotations

from math import inf
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from simkv.workload.clients import Clients, find_sessions
from simkv.workload.generated_sessions import Sessions

BASE: dict[str, Any] = {
    "num_sessions": 2,
    "turns": 3,
    "prompt_tokens": 10,
    "output_tokens": 4,
    "request_rate": inf,
}
AGENTS: dict[str, Any] = {
    "count": 2,
    "turns": 2,
    "prompt_tokens": 7,
    "output_tokens": 3,
    "tool_time": 0.5,
}


def serve(clients: Clients, service: float) -> dict[int, tuple[float, float]]:
    """Serve each request in ``service`` seconds without a queue; return starts and ends (s)."""
    times: dict[int, tuple[float, float]] = {}
    running: list[tuple[float, int]] = []
    now = 0.0
    while True:
        for request in clients.send(now):
            times[request.id] = (now, now + service)
            running.append((now + service, request.id))
        following = clients.next_time()
        moments = [end for end, _ in running] + ([] if following is None else [following])
        if not moments:
            return times
        now = max(now, min(moments))
        for end, number in sorted(one for one in running if one[0] <= now):
            running.remove((end, number))
            clients.ended(number, now)


def test_fork_join_lasts_the_sum_of_its_stages() -> None:
    sessions = Sessions(**BASE, think_time=1.0, tool_time=2.0, sub_agents=AGENTS)
    requests, after = sessions.requests(None)
    times = serve(Clients(requests, after), 0.25)
    assert len(requests) == 2 * (3 + 2 * 2 * 2)
    # Three turns, two joins (each after two calls with a tool call in between), and a delay of 3 s.
    assert max(end for _, end in times.values()) == pytest.approx(3 * 0.25 + 2 * (0.5 + 0.5 + 3.0))


def test_join_repeats_the_last_answer_of_each_sub_agent() -> None:
    sessions = Sessions(**BASE | {"num_sessions": 1, "turns": 2}, sub_agents=AGENTS)
    requests, after = sessions.requests(None)
    (join,) = (number for number, one in after.items() if len(one.before) == 2)
    streams = [stream for stream, _, _ in requests[join].segments]
    assert streams == ["u0", "o0", *(f"o{one}" for one in after[join].before), f"u{join}"]
    assert requests[join].prompt_tokens == 10 + 4 + 3 + 3 + 10


def test_sub_agents_share_a_prompt_but_no_context_with_the_main_agent() -> None:
    agents = AGENTS | {"prefix_tokens": 50}
    requests, _ = Sessions(**BASE, sub_agents=agents).requests(None)
    own = [one for one in requests if one.segments[0].stream == "sub-agents"]
    assert len(own) == 2 * 2 * 2 * 2
    assert [one.prompt_tokens for one in own if len(one.segments) == 2] == [57] * 8


def test_compaction_cuts_the_context_to_its_length() -> None:
    sessions = Sessions(
        **BASE | {"num_sessions": 1, "turns": 6},
        prefix_group="a",
        prefix_tokens=20,
        compact_at=60,
        compact_to=8,
    )
    requests, _ = sessions.requests(None)
    # The fourth prompt would have 72 tokens; it is cut to 20 + 8 + 10. The sixth prompt would have
    # 66.
    assert [one.prompt_tokens for one in requests] == [30, 44, 58, 38, 52, 38]
    assert requests[4].segments[:3] == requests[3].segments
    assert requests[5].segments[1] != requests[3].segments[1]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"compact_at": 60}, "must be set together"),
        ({"compact_at": 60, "compact_to": 60}, "must be greater than prefix_tokens"),
    ],
)
def test_rejects_compaction_that_frees_nothing(fields: dict[str, int], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        Sessions(**BASE, **fields)


def test_next_session_starts_when_one_ends() -> None:
    requests, after = Sessions(**BASE | {"num_sessions": 4}, think_time=1.0).requests(None)
    times = serve(Clients(requests, after, max_sessions=2), 0.5)
    assert len(times) == 12
    assert max(end for _, end in times.values()) == 2 * (3 * 0.5 + 2 * 1.0)


@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(1, 4),
    turns=st.integers(1, 5),
    agents=st.integers(1, 3),
    every=st.integers(1, 3),
    delays=st.tuples(st.floats(0, 3), st.floats(0, 3)),
    compact=st.sampled_from([None, 40]),
    lanes=st.sampled_from([None, 1, 2]),
    service=st.floats(0.01, 2),
)
def test_laws_of_graphs(
    count: int,
    turns: int,
    agents: int,
    every: int,
    delays: tuple[float, float],
    compact: int | None,
    lanes: int | None,
    service: float,
) -> None:
    """Calls follow their predecessors and delays; tokens add up; lanes limit the sessions."""
    sessions = Sessions(
        **BASE | {"num_sessions": count, "turns": turns},
        think_time=delays[0],
        tool_time=delays[1],
        sub_agents=AGENTS | {"count": agents, "every": every},
        compact_at=compact,
        compact_to=compact and 8,
    )
    requests, after = sessions.requests(None)
    times = serve(Clients(requests, after, max_sessions=lanes), service)
    assert len(times) == sessions.size == len(requests)
    for number, one in after.items():
        assert times[number][0] >= max(times[i][1] for i in one.before) + one.delay - 1e-9
    for request in requests:
        assert sum(end - start for _, start, end in request.segments) == request.prompt_tokens
    if lanes is not None:
        of = find_sessions(after)
        spans: dict[int, list[float]] = {}
        for number, (start, end) in times.items():
            spans.setdefault(of.get(number, number), []).extend((start, end))
        for begin in (min(span) for span in spans.values()):
            assert sum(min(s) <= begin < max(s) for s in spans.values()) <= lanes


@pytest.mark.parametrize("field", ["count", "turns"])
def test_rejects_too_many_sub_agents_before_it_builds_them(field: str) -> None:
    with pytest.raises(
        ValueError, match="sub_agents: too many requests: at most 1,000 turns per sub-agent"
    ):
        Sessions(**BASE, sub_agents=AGENTS | {field: 50_000_000})
