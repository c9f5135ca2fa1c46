"""Tests of sessions that are sampled from a template graph of named turns."""

from __future__ import annotations

from math import inf
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simkv.core.errors import InputError
from simkv.core.outcome import Outcome
from simkv.metrics.run_metrics import request_rows
from simkv.metrics.run_result import RunResult
from simkv.metrics.scenario_runner import run_scenario
from simkv.metrics.session_turns import find_awaited
from simkv.scenario.scenario import Scenario
from simkv.scenario.scenario_loader import load
from simkv.workload.clients import Clients
from simkv.workload.generated_sessions import Sessions
from tests.workload.test_generated_sessions import serve

LENGTHS: dict[str, Any] = {"prompt_tokens": 10, "output_tokens": 4}


def turn(name: str, *wait_for: str, **fields: Any) -> dict[str, Any]:
    waits = {"wait_for": list(wait_for)} if wait_for else {}
    return {"turn": name, **waits, **LENGTHS, **fields}


def sessions(graph: list[dict[str, Any]], count: int = 1, **fields: Any) -> Sessions:
    return Sessions(**{"num_sessions": count, "request_rate": inf, "graph": graph, **fields})


#: An agent with three sub-agents of two turns each, and a join.
FORK_JOIN = [
    turn("plan"),
    turn("search", "plan", count=3, context="own", prefix_group="s", prefix_tokens=50),
    turn("read", "search", each=True, tool_time=0.5, prompt_tokens=7),
    turn("merge", "read", context="plan", think_time=1.0, tool_time=2.0),
]


def test_fork_join_lasts_the_sum_of_its_stages() -> None:
    requests, after = sessions(FORK_JOIN, 2).requests(None)
    times = serve(Clients(requests, after), 0.25)
    assert len(times) == 2 * (1 + 3 + 3 + 1)
    assert max(end for _, end in times.values()) == pytest.approx(4 * 0.25 + 0.5 + 3.0)


def test_branches_wait_for_their_own_copies_and_the_join_for_all() -> None:
    requests, after = sessions(FORK_JOIN).requests(None)
    waits = [after[number].before for number in range(1, 8)]
    assert waits == [(0,), (0,), (0,), (1,), (2,), (3,), (4, 5, 6)]
    streams = [[stream for stream, _, _ in request.segments] for request in requests]
    assert streams[2] == ["gs", "u2"]
    assert streams[5] == ["gs", "u2", "o2", "u5"]
    assert streams[7] == ["u0", "o0", "o4", "o5", "o6", "u7"]
    assert [request.prompt_tokens for request in requests] == [10, *[60] * 3, *[71] * 3, 36]


def test_a_turn_continues_the_first_context_by_default() -> None:
    graph = [turn("a"), turn("b", "a", count=2), turn("c", "b"), turn("d", "a", "c")]
    requests, _ = sessions(graph, prefix_group="p", prefix_tokens=5).requests(None)
    streams = [[stream for stream, _, _ in request.segments] for request in requests]
    assert streams[3] == ["gp", "u0", "o0", "u1", "o1", "o2", "u3"]
    assert streams[4] == ["gp", "u0", "o0", "o3", "u4"]


def test_compaction_cuts_a_context_of_a_graph() -> None:
    chain = [turn("0"), *(turn(str(n), str(n - 1)) for n in range(1, 6))]
    graph = sessions(chain, prefix_group="a", prefix_tokens=20, compact_at=60, compact_to=8)
    linear = Sessions(
        **LENGTHS, num_sessions=1, request_rate=inf, turns=6, prefix_group="a", prefix_tokens=20,
        compact_at=60, compact_to=8,
    )  # fmt: skip
    assert graph.requests(None) == linear.requests(None)
    assert [one.prompt_tokens for one in graph.requests(None)[0]] == [30, 44, 58, 38, 52, 38]


def test_turns_that_do_not_fit_are_left_out_with_their_followers() -> None:
    graph = [turn("a"), turn("b", "a", prompt_tokens=500), turn("c", "a"), turn("d", "b", "c")]
    requests, after = sessions(graph, max_model_len=100).requests(None)
    assert len(requests) == 2
    assert {number: one.before for number, one in after.items()} == {1: (0,)}


NAMES = "abcdef"
DISTRIBUTIONS = [
    *(1, 3, {"distribution": "uniform", "low": 1, "high": 3}),
]
TIMES = [0.0, 0.7, {"distribution": "exponential", "mean": 2.0}]


@st.composite
def graphs(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Return a graph of two to six turns."""
    graph = [turn("a")]
    for index in range(1, draw(st.integers(2, 6))):
        earlier = list(NAMES[:index])
        waits = draw(st.lists(st.sampled_from(earlier), min_size=1, max_size=3, unique=True))
        fields: dict[str, Any] = {
            "think_time": draw(st.sampled_from(TIMES)),
            "tool_time": draw(st.sampled_from(TIMES)),
            "output_tokens": draw(
                st.sampled_from([3, {"distribution": "uniform", "low": 1, "high": 20}])
            ),
        }
        if draw(st.booleans()):
            fields["each"] = True
        else:
            fields["count"] = draw(st.sampled_from(DISTRIBUTIONS))
        if draw(st.integers(0, 3)) == 0:
            fields |= {"context": "own", "prefix_group": "s", "prefix_tokens": 9}
        elif draw(st.integers(0, 3)) == 0:
            fields |= {"context": "a", "first_wins": draw(st.booleans()) and "a" not in waits}
        graph.append(turn(NAMES[index], *waits, **fields))
    return graph


@settings(max_examples=100, deadline=None)
@given(graph=graphs(), seed=st.integers(0, 99), compact=st.booleans(), service=st.floats(0.01, 2))
def test_laws_of_template_graphs(
    graph: list[dict[str, Any]], seed: int, compact: bool, service: float
) -> None:
    """Turns follow their predecessors and delays; tokens add up; a seed gives the same requests."""
    limits = {"compact_at": 60, "compact_to": 8} if compact else {}
    form = sessions(graph, 2, seed=seed, **limits)
    requests, after = form.requests(None)
    assert (requests, after) == sessions(graph, 2, seed=seed, **limits).requests(None)
    assert len(requests) == form.size
    clients = Clients(requests, after)
    times = serve(clients, service)
    assert set(times) == {request.id for request in requests} - {
        number for number in clients.cancelled if number not in times
    }
    for number, (start, _) in times.items():
        if number in after:
            ends = [times[one][1] for one in after[number].before if one in times]
            ready = min(ends) if after[number].first_wins else max(ends)
            assert start >= ready + after[number].delay - 1e-9
    for request in requests:
        assert sum(end - start for _, start, end in request.segments) == request.prompt_tokens
        for stream, _, end in request.segments:
            if stream[0] == "o":
                assert end == requests[int(stream[1:])].output_tokens
            elif stream[0] == "u":
                assert end == 10


ENGINES: dict[str, dict[str, Any]] = {
    "vllm": {"name": "vllm", "num_gpu_blocks": 80, "block_size": 8, "max_model_len": 512},
    "sglang": {"name": "sglang", "max_total_num_tokens": 800},
}
UP_TO_30 = {"distribution": "uniform", "low": 1, "high": 30}
RACE = [
    turn("plan", prompt_tokens=UP_TO_30),
    turn("try", "plan", count={"distribution": "uniform", "low": 2, "high": 4},
         tool_time={"distribution": "exponential", "mean": 3.0}, output_tokens=UP_TO_30),
    turn("check", "try", each=True, think_time=0.5, output_tokens=UP_TO_30),
    turn("answer", "check", first_wins=True, context="plan", tool_time=1.0),
]  # fmt: skip


def race(
    engine: str, leaping: bool = True, graph: list[dict[str, Any]] = RACE, count: int = 12
) -> RunResult:
    scenario = Scenario.model_validate(
        {
            "name": "race",
            "workload": {
                "sessions": {"num_sessions": count, "request_rate": 0.2, "graph": graph},
                "session_deadline": 40.0,
            },
            "engine": ENGINES[engine],
            "profile": "unit-step",
        }
    )
    return run_scenario(scenario, Path(), leaping=leaping)


@pytest.mark.parametrize("engine", ENGINES)
def test_the_first_branch_wins_and_cancels_the_others(engine: str) -> None:
    found = race(engine)
    lives, clients = found.record.requests, found.run.clients
    joins = {number: one for number, one in clients.after.items() if one.first_wins}
    assert len(joins) == 12
    assert found.summary["sessions"]["finished"] == 12
    assert found.summary["finished"] + found.summary["cancelled"] == len(lives)
    assert 0 < found.summary["sessions"]["met_deadline"] < 12
    for number, one in joins.items():
        winner = find_awaited(found.record, one)
        assert winner.ended_at is not None
        assert clients.arrived[number] == pytest.approx(winner.ended_at + 1.0)
        assert len({lives[other].request.output_tokens for other in one.before}) == 1
        losers = {lives[other].outcome for other in one.before if lives[other] is not winner}
        assert losers <= {Outcome.CANCELLED, Outcome.FINISHED}
    assert sum(life.outcome is Outcome.CANCELLED for life in lives.values()) >= 12


@pytest.mark.parametrize("engine", ENGINES)
def test_leaping_does_not_change_a_graph(engine: str) -> None:
    for graph in (RACE, FORK_JOIN):
        rows = [
            request_rows("run", race(engine, leaping, graph).record) for leaping in (True, False)
        ]
        assert rows[0] == rows[1]


@settings(max_examples=15, deadline=None)
@given(graph=graphs(), engine=st.sampled_from(sorted(ENGINES)))
def test_leaping_changes_no_random_graph(graph: list[dict[str, Any]], engine: str) -> None:
    found = [race(engine, leaping, graph, count=3) for leaping in (True, False)]
    rows = [request_rows("run", one.record) for one in found]
    assert rows[0] == rows[1]
    record, after = found[0].record, found[0].run.clients.after
    for number, arrived in found[0].run.clients.arrived.items():
        if number in after:
            awaited = find_awaited(record, after[number])
            assert arrived == pytest.approx((awaited.ended_at or 0.0) + after[number].delay)


def test_fork_join_on_an_engine_has_the_closed_form(tmp_path: Path) -> None:
    """A step takes 1 s: each answer of 4 tokens takes 4 s, however many branches run."""
    found = run(tmp_path, GRAPH)
    ends = [life.ended_at for _, life in sorted(found.record.requests.items())]
    search = 4.0 + 1.5 + 4.0
    assert ends == pytest.approx([4.0, *[search] * 3, search + 0.5 + 2.0 + 4.0])
    figures = found.summary["sessions"]
    assert figures["makespan_ms"]["mean"] == pytest.approx(1000 * (search + 6.5))
    assert figures["shares"]["tools"] == pytest.approx(100 * 3.5 / 16)
    assert figures["shares"]["think"] == pytest.approx(100 * 0.5 / 16)


GRAPH = """
name: graph
workload:
  sessions:
    num_sessions: 1
    request_rate: .inf
    graph:
      - {turn: plan, prompt_tokens: 10, output_tokens: 4}
      - {turn: search, wait_for: [plan], count: 3, tool_time: 1.5, prompt_tokens: 8, output_tokens: 4}
      - {turn: merge, wait_for: [search], think_time: 0.5, tool_time: 2, prompt_tokens: 8, output_tokens: 4}
engine: {name: vllm, num_gpu_blocks: 80, max_model_len: 128, async_scheduling: false}
profile: unit-step
"""  # noqa: E501


def run(folder: Path, text: str) -> RunResult:
    (path := folder / "graph.yaml").write_text(text, encoding="utf-8")
    [scenario] = load(path).values()
    return run_scenario(scenario, folder)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("[search]", "[serch]", "10: workload.sessions.graph.2.wait_for: unknown turn 'serch' (did "
         "you mean 'search'?)"),
        ("[plan]", "[merge]", "9: workload.sessions.graph.1.wait_for: must be turns that are "
         "earlier in the list, so that there is no cycle; found 'merge'"),
        ("[plan]", "[search]", "9: workload.sessions.graph.1.wait_for: must be turns that are"),
        ("[plan]", "[plan, plan]", "9: workload.sessions.graph.1.wait_for: must name each turn "),
        ("wait_for: [search], think_time: 0.5, tool_time: 2, ", "", "10: workload.sessions.graph.2."
         "wait_for: missing; only the first turn starts without waiting"),
        ("turn: search", "turn: plan", "9: workload.sessions.graph.1.turn: must be a unique name"),
        ("turn: plan", "turn: own", "8: workload.sessions.graph.0.turn: must be a unique name"),
        ("plan, prompt", "plan, tool_time: 1, prompt", "8: workload.sessions.graph.0.tool_time: "
         "not allowed for the first turn"),
        ("[search]", "[search], first_wins: true", "10: workload.sessions.graph.2.context: missing;"
         " with first_wins, set a turn before the branches (plan) or own"),
        ("[search]", "[search], first_wins: true, context: search", "10: workload.sessions.graph.2."
         "context: must be own or a turn that always has an answer when this turn starts (plan)"),
        ("count: 3", "count: 3, each: true", "9: workload.sessions.graph.1.count: cannot be comb"),
        ("count: 3", "count: 0", "9: workload.sessions.graph.1.count: "),
        ("count: 3", "prefix_group: s", "9: workload.sessions.graph.1.prefix_group: prefix_group"),
        ("count: 3", "prefix_group: s, prefix_tokens: 4", "9: workload.sessions.graph.1."
         "prefix_group: requires context: own"),
        ("count: 3", "count: 1000", "4: workload.sessions: graph: too many turns: at most 1,000 "
         "per session; found 1,001 up to turn 'search'"),
        ("count: 3", "counts: 3", "9: workload.sessions.graph.1.counts: unknown field"),
        ("request_rate: .inf", "request_rate: .inf\n    turns: 3", "7: workload.sessions.turns: "
         "cannot be combined with graph"),
        ("request_rate: .inf", "request_rate: .inf\n    sub_agents: {count: 1, prompt_tokens: 1, "
         "output_tokens: 1}", "7: workload.sessions.sub_agents: cannot be combined with graph"),
    ],
)  # fmt: skip
def test_invalid_graphs_are_refused_by_line(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    assert old in GRAPH
    with pytest.raises(InputError) as caught:
        run(tmp_path, GRAPH.replace(old, new, 1))
    assert f"graph.yaml:{message}" in str(caught.value)


def test_turns_and_lengths_are_required_without_a_graph(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        run(tmp_path, GRAPH[: GRAPH.index("    graph")] + GRAPH[GRAPH.index("engine:") :])
    for name in ("turns", "prompt_tokens", "output_tokens"):
        assert f"graph.yaml:4: workload.sessions.{name}: missing" in str(caught.value)
