"""Tests of explanations of sessions, and of their rows in the report, with times computed by
hand.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from simkv.cli import app
from simkv.core.errors import InputError
from simkv.metrics.run_result import RunResult
from simkv.metrics.scenario_runner import run_file
from simkv.metrics.session_turns import find_slowest_session, list_sessions, list_turns
from simkv.report.chart_data import TickScale
from simkv.report.html_page import render_html
from simkv.report.run_explanation import explain_run
from simkv.report.session_explanation import explain_session, sum_session_time
from simkv.report.session_lanes import build_session_rows

#: A step takes 1 s. A turn of 3 s, two sub-agents of 2 s each, 3 s of tools and think time, and a
#: turn of 3 s.
AGENT = """
name: agent
workload:
  sessions:
    num_sessions: 2
    request_rate: 1
    burstiness: .inf
    turns: 2
    prompt_tokens: 8
    output_tokens: 3
    think_time: 1
    tool_time: 2
    sub_agents: {count: 2, turns: 1, prompt_tokens: 4, output_tokens: 2}
  max_sessions: 1
engine: {name: vllm, block_size: 4, num_gpu_blocks: 40, max_model_len: 64, async_scheduling: false}
profile: unit-step
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sessions") / "agent.yaml"
    path.write_text(AGENT, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def result(file: Path) -> RunResult:
    return run_file(file)["run"]


def explain(*arguments: object) -> str:
    done = CliRunner().invoke(app, ["explain", *map(str, arguments)])
    if done.exception:
        raise done.exception
    return done.output


def test_a_session_is_a_table_of_turns_and_its_time(result: RunResult) -> None:
    told = list(explain_session("run", result, 0))
    lives = list_sessions(result.record, result.run.clients)[0]
    start = result.run.clients.arrived[lives[0].request.id]
    assert told[0] == (
        f"Session 0 in run: 4 of 4 requests finished, in 3 turns; from {start:.3f} s to "
        f"{start + 11:.3f} s, 11 s."
    )
    turns = list_turns(result.record, result.run.clients, lives)
    rows = [line.split() for line in told[3:7]]
    assert [int(row[0]) for row in rows] == [1, 2, 2, 3]
    assert [turn.ended for turn in turns] == pytest.approx(
        [start + 3, start + 5, start + 5, start + 11]
    )
    assert [(turn.tool_time, turn.think_time) for turn in turns] == [(0, 0)] * 3 + [(2, 1)]
    # Ten tokens of the first turn have KV: two full blocks of 4.
    assert [turn.cached for turn in turns] == [0, 0, 0, 8]
    assert [turn.critical for turn in turns].count(True) == 3
    assert sum_session_time(result, 0) == pytest.approx(
        {"tool calls": 2, "think time": 1, "prefill": 3, "decode": 5}
    )


def test_wait_for_the_start_is_not_part_of_the_session(result: RunResult) -> None:
    # max_sessions: the second session, which arrives 1 s after the first, waits for its end.
    told = list(explain_session("run", result, 1))
    assert told[0].endswith(", 11 s.")
    assert told[1].startswith("The session waited 10 s for its start (max_sessions).")
    assert not any("waited" in line for line in explain_session("run", result, 0))
    assert "waiting in the client" not in sum_session_time(result, 1)
    assert sum(sum_session_time(result, 1).values()) == pytest.approx(11)
    figures = result.summary["sessions"]
    assert figures["start_wait_ms"]["mean"] == pytest.approx((0 + 10_000) / 2)
    assert figures["makespan_ms"]["mean"] == pytest.approx(11_000)


def test_waiting_in_the_client_is_part_of_the_session(file: Path) -> None:
    text = AGENT.replace("max_sessions", "max_concurrency")
    (limited := file.parent / "limited.yaml").write_text(text, encoding="utf-8")
    result = run_file(limited)["run"]
    assert sum_session_time(result, 1)["waiting in the client"] > 0
    told = list(explain_session("run", result, 1))
    assert "waiting in the client" in "\n".join(told)
    assert "start_wait_ms" not in result.summary["sessions"]


def test_the_slowest_session_is_named(file: Path) -> None:
    # In the second session, only the start comes late.
    result = run_file(file)["run"]
    assert find_slowest_session(result.record, result.run.clients) == 0
    last = list(explain_run("run", result, "simkv explain x {}".format))[-1]
    assert last == "Explain one session: simkv explain x --session 0"


def test_answer_as_json(file: Path) -> None:
    (variant,) = json.loads(explain(file, "--session", 0, "--json"))["variants"].values()
    assert variant["request"] is None
    found: dict[str, Any] = variant["session"]
    assert found["session"] == 0
    assert found["start_wait_s"] == 0
    assert found["critical_seconds"]["tool calls"] == pytest.approx(2)
    assert [len(turn["before"]) for turn in found["turns"]] == [0, 1, 1, 2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--session", 2), "--session 2: there is no such session; expected a number from 0 to 1"),
        ((0, "--session", 1), "--session 1 cannot be combined with a request id, got 0"),
        (("--session", 2, "--json"), "there is no such session"),
    ],
)
def test_bad_session(file: Path, arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        explain(file, *arguments)


def test_workload_without_sessions() -> None:
    with pytest.raises(InputError, match="has no sessions, because no request waits"):
        explain("mistralrs-six", "--variant", "before", "--session", 0)


def test_rows_of_the_report_show_gaps_and_do_not_overlap(result: RunResult) -> None:
    ticks = TickScale(100.0)
    rows = build_session_rows(result, ticks)
    assert [(session["number"], session["rows"]) for session in rows] == [(0, 2), (1, 2)]
    lives = list(result.record.requests.values())
    for session in rows:
        free = [0] * session["rows"]
        for place, row, since, tools, arrived in session["turns"]:
            assert free[row] <= since <= since + tools <= arrived
            free[row] = ticks.of(lives[place].ended_at or 0.0)
        _, _, since, tools, arrived = session["turns"][-1]
        assert (tools, arrived - since) == (ticks.of(2), ticks.of(3))


def test_page_has_a_session_view_only_with_sessions(result: RunResult) -> None:
    assert 'data-figure="sessions"' in render_html({"run": result})
    plain = run_file(Path("scenarios/mistralrs-six.yaml"))["after"]
    assert 'data-figure="sessions"' not in render_html({"run": plain})
    assert build_session_rows(plain, TickScale(100.0)) == []
