"""Tests of metrics of sessions, computed by hand."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import pytest

from simkv.core.outcome import Outcome
from simkv.core.request import Request, Segment
from simkv.metrics.session_metrics import session_figures
from simkv.sim.resumed_prefixes import count_shared, find_resumed_prefixes
from simkv.sim.run_record import RequestRecord
from simkv.workload.clients import Clients, Dependency


def life(request: Request, row: int, context: int, ended: float) -> RequestRecord:
    """Return a finished request with one step at index ``row``."""
    return RequestRecord(
        request,
        outcome=Outcome.FINISHED,
        ended_at=ended,
        tokens=request.output_tokens,
        segment_data=array("i", (3, row, row)),
        chunk_rows=array("i", (row, request.prompt_tokens - context, context)),
    )


def figures(context: int) -> dict[str, Any]:
    """Return the metrics of two turns; the second turn finds ``context`` tokens in the cache."""
    first = Request(0, 20, 10, segments=(Segment("u0", 0, 20),), output_tokens=10)
    prompt = (*first.segments, Segment("o0", 0, 10), Segment("u1", 0, 5))
    second = Request(1, 35, 4, segments=prompt, output_tokens=4)
    sent = Clients([first, second], {1: Dependency((0,), 1.0, 3.0)})
    sent.arrived = sent.started = {0: 0.0, 1: 7.0}
    lives = {0: life(first, 0, 0, 3.0), 1: life(second, 1, context, 10.0)}
    record: Any = SimpleNamespace(requests=lives, steps=SimpleNamespace(start=[1.0, 9.0]))
    record.resumed = find_resumed_prefixes(record, sent.after, 8)
    return session_figures(record, sent)


def test_time_of_a_session_is_split_along_its_critical_path() -> None:
    found = figures(24)
    assert (found["count"], found["finished"]) == (1, 1)
    assert found["makespan_ms"]["mean"] == pytest.approx(10_000)
    assert found["shares"] == pytest.approx({"waiting": 30, "model": 30, "tools": 30, "think": 10})


def test_hit_rate_by_idle_time() -> None:
    # The second turn arrives 4 s after the first answer, and finds 24 of its 35 tokens.
    (row,) = figures(24)["by_idle_time"]
    assert (row["up_to_s"], row["requests"]) == (10.0, 1)
    assert row["hit_rate"] == pytest.approx(100 * 24 / 35)


@pytest.mark.parametrize(("context", "tax"), [(24, 0), (8, 16), (0, 24)])
def test_resume_tax_counts_full_blocks_computed_again(context: int, tax: int) -> None:
    # 29 of the first 30 tokens have KV: three full blocks of 8.
    found = figures(context)
    assert found["resume_tax_tokens"] == tax
    assert found["resume_tax"] == pytest.approx(100 * tax / 55)
    assert [row["hit_rate"] for row in found["by_turn"]] == pytest.approx([0, 100 * context / 35])


def test_shared_tokens_do_not_depend_on_how_a_stream_is_cut() -> None:
    whole = (Segment("a", 0, 10), Segment("b", 0, 3))
    parts = (Segment("a", 0, 4), Segment("a", 4, 10), Segment("b", 0, 2), Segment("c", 0, 1))
    assert count_shared(whole, parts) == 12
    assert count_shared(whole, (Segment("a", 1, 10),)) == 0


def test_an_agent_resumes_its_own_last_turn_after_sub_agents() -> None:
    first = Request(0, 20, 10, segments=(Segment("u0", 0, 20),), output_tokens=10)
    agent = Request(1, 9, 4, segments=(Segment("u1", 0, 9),), output_tokens=4)
    segments = (*first.segments, Segment("o0", 0, 10), Segment("o1", 0, 4), Segment("u2", 0, 5))
    second = Request(2, 39, 4, segments=segments, output_tokens=4)
    lives = {r.id: life(r, r.id, 0, r.id + 1.0) for r in (first, agent, second)}
    record: Any = SimpleNamespace(requests=lives)
    after = {1: Dependency((0,), 0.0), 2: Dependency((1,), 0.0)}
    assert find_resumed_prefixes(record, after, 8) == {2: (24, 0)}


def three_sessions(**options: Any) -> dict[str, Any]:
    """Return the metrics of three sessions: two turns (10 s), one turn (4 s), and a session that
    timed out.
    """
    requests = [Request(i, 8, 4, output_tokens=4) for i in range(4)]
    sent = Clients(requests, {2: Dependency((0,), 1.0)})
    sent.arrived = sent.started = {0: 1.0, 1: 0.0, 2: 5.0, 3: 2.0}
    lives = {i: life(requests[i], i, 0, end) for i, end in ((0, 4.0), (1, 4.0), (2, 11.0))}
    lives[3] = RequestRecord(requests[3], outcome=Outcome.TIMED_OUT, ended_at=9.0)
    starts = SimpleNamespace(start=[1.0, 0.0, 5.0])
    record: Any = SimpleNamespace(requests=lives, steps=starts, resumed={})
    return session_figures(record, sent, **options)


@pytest.mark.parametrize(("deadline", "met"), [(3.9, 0), (4.0, 1), (9.9, 1), (10.0, 2)])
def test_deadline_counts_finished_sessions_in_time(deadline: float, met: int) -> None:
    found = three_sessions(deadline=deadline)
    assert (found["count"], found["finished"]) == (3, 2)
    assert found["met_deadline"] == met
    assert found["met_deadline_share"] == pytest.approx(100 * met / 3)
    assert "met_deadline" not in three_sessions()


def test_warm_up_sessions_are_in_no_figure() -> None:
    found = three_sessions(deadline=5.0, warm_up=1)
    assert (found["count"], found["finished"], found["met_deadline"]) == (2, 1, 0)
    assert found["makespan_ms"]["mean"] == pytest.approx(10_000)
    assert found["turn_ms"]["mean"] == pytest.approx((3_000 + 6_000) / 2)
    assert [row["requests"] for row in found["by_turn"]] == [2, 1]
    assert three_sessions(warm_up=9)["count"] == 0


def test_figures_count_from_the_start_of_a_session() -> None:
    # Two sessions arrive at 0 s. The second one starts at 10 s, when the first one ends.
    requests = [Request(i, 8, 4, output_tokens=4) for i in range(4)]
    sent = Clients(requests, {2: Dependency((0,), 1.0), 3: Dependency((1,), 1.0)}, max_sessions=1)
    ends = {0: 4.0, 2: 10.0, 1: 13.0, 3: 18.0}
    sends = {0: 0.0, 2: 5.0, 1: 10.0, 3: 14.0}
    for i in sends:
        assert [request.id for request in sent.send(sends[i])] == [i]
        sent.ended(i, ends[i])
    lives = {i: life(requests[i], i, 0, ends[i]) for i in range(4)}
    steps = SimpleNamespace(start=[sends[i] for i in range(4)])
    record: Any = SimpleNamespace(requests=lives, steps=steps, resumed={})
    found = session_figures(record, sent, deadline=9.0)
    assert found["start_wait_ms"]["mean"] == pytest.approx((0 + 10_000) / 2)
    assert found["makespan_ms"]["mean"] == pytest.approx((10_000 + 8_000) / 2)
    assert found["turn_ms"]["mean"] == pytest.approx((4_000 + 5_000 + 3_000 + 4_000) / 4)
    assert found["shares"]["waiting"] == 0
    assert found["met_deadline"] == 1
    assert session_figures(record, sent, warm_up=1)["start_wait_ms"]["mean"] == 10_000
    assert "start_wait_ms" not in three_sessions()
