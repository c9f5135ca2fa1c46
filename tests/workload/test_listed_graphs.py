"""Tests of sessions that a scenario lists as a graph of requests."""

from __future__ import annotations

from pathlib import Path

import pytest

from simkv.core.errors import InputError
from simkv.core.outcome import Outcome
from simkv.metrics.run_result import RunResult
from simkv.metrics.scenario_runner import run_scenario
from simkv.scenario.scenario_loader import load
from simkv.study.whatif.workload_rows import list_requests

#: An agent with two branches and a join. A step takes 1 s.
GRAPH = """
name: graph
workload:
  requests:
    - {arrival: 2, prompt_tokens: 10, output_tokens: 3}
    - {wait_for: [0], prompt_tokens: 8, output_tokens: 4, tool_time: 1.5}
    - {wait_for: [0], prompt_tokens: 8, output_tokens: 9}
    - {wait_for: [1, 2], prompt_tokens: 10, output_tokens: 2, think_time: 0.25, tool_time: 0.5}
engine: {name: vllm, num_gpu_blocks: 40, max_model_len: 64, async_scheduling: false}
profile: unit-step
"""


def run(text: str, folder: Path) -> RunResult:
    (path := folder / "graph.yaml").write_text(text, encoding="utf-8")
    [scenario] = load(path).values()
    return run_scenario(scenario, folder)


def test_fork_and_join_have_the_closed_form(tmp_path: Path) -> None:
    found = run(GRAPH, tmp_path)
    # The root ends at 2 + 3. The second branch runs from 5 to 14, and the join follows it.
    assert found.run.clients.arrived == pytest.approx({0: 2.0, 1: 6.5, 2: 5.0, 3: 14.75})
    ends = [life.ended_at for _, life in sorted(found.record.requests.items())]
    assert ends == pytest.approx([5.0, 11.0, 14.0, 16.75])
    sessions = found.summary["sessions"]
    assert sessions["count"] == 1
    assert sessions["makespan_ms"]["mean"] == pytest.approx(14_750)
    assert sessions["shares"]["tools"] == pytest.approx(100 * 0.5 / 14.75)


def test_the_first_branch_wins(tmp_path: Path) -> None:
    found = run(GRAPH.replace("[1, 2],", "[1, 2], first_wins: true,"), tmp_path)
    assert found.run.clients.arrived[3] == pytest.approx(11.75)
    outcomes = [life.outcome for _, life in sorted(found.record.requests.items())]
    done, cancelled = Outcome.FINISHED, Outcome.CANCELLED
    assert outcomes == [done, done, cancelled, done]


def test_rows_of_a_graph_have_the_arrivals_of_a_run(tmp_path: Path) -> None:
    found = run(GRAPH, tmp_path)
    rows = list_requests(found.scenario, tmp_path)
    assert [row.arrival for row in rows.values()] == pytest.approx([2.0, 6.5, 5.0, 14.75])
    assert all(row.wait_for is None for row in rows.values())


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("[1, 2]", "[1, 3]", "requests[3].wait_for: must be numbers of earlier requests, below 3"),
        ("[1, 2]", "[]", "wait_for: "),
        ("[1, 2]", "[-1]", "wait_for"),
        ("arrival: 2,", "tool_time: 2,", "tool_time requires wait_for"),
        ("wait_for: [0], prompt_tokens: 8, output_tokens: 9", "wait_for: [0], arrival: 1, "
         "prompt_tokens: 8, output_tokens: 9", "set at most one of arrival and wait_for"),
    ],
)  # fmt: skip
def test_bad_graphs_are_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        run(GRAPH.replace(old, new), tmp_path)
    assert message in str(caught.value)
    assert "graph.yaml:" in str(caught.value)
