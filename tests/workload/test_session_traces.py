"""Tests of traces of sessions: agentic Mooncake traces, growing prompts, and rows that wait for
other rows.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from simkv.core.errors import InputError
from simkv.core.request import Request, Segment
from simkv.metrics.scenario_runner import run_scenario
from simkv.scenario.scenario import Scenario
from simkv.sim.resumed_prefixes import count_shared
from simkv.workload.clients import Dependency
from simkv.workload.formats.mapped_columns import parse_columns
from simkv.workload.trace_conversion import convert_trace
from simkv.workload.trace_reader import TraceReader, read_trace
from simkv.workload.trace_selection import Selection

#: An agent, two sub-agents that it starts, and its next turn; blocks of 16 tokens.
AGENT: list[dict[str, Any]] = [
    {"request_id": "a", "session_id": "main", "timestamp": 1000.0, "input_length": 32,
     "output_length": 5, "hash_ids": [1, 2], "branches": ["b", "c"], "prefix_reset": True},
    {"request_id": "b", "session_id": "sub1", "input_length": 20, "output_length": 3,
     "hash_ids": [7, 8], "wait_for": ["a"], "delay": 500.0, "prefix_reset": True},
    {"request_id": "c", "session_id": "sub2", "input_length": 20, "output_length": 4,
     "hash_ids": [7, 9], "wait_for": ["a"], "tool_events": []},
    {"request_id": "d", "session_id": "main", "input_length": 48, "output_length": 2,
     "hash_ids": [1, 2, 3], "wait_for": ["b", "c"], "delay": 250.0, "tool_wait_ms": 1500.0},
]  # fmt: skip
GROWN = "sid,turn,ISL,OSL,TTFT\nx,1,100,10,0.1\ny,1,50,5,0.1\nx,2,130,20,0.2\nx,5,150,7,0.3\n"
COLUMNS = "session=sid,turn=turn,prompt_tokens=ISL,output_tokens=OSL"


def written(folder: Path, rows: list[dict[str, Any]]) -> Path:
    path = folder / "agents.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def shared(one: Request, other: Request) -> int:
    first = one.segments or (Segment(f"u{one.id}", 0, one.prompt_tokens),)
    return count_shared(first, other.segments)


def test_agentic_mooncake_rows_wait_for_others(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, AGENT))
    assert trace.format == "mooncake-agentic"
    assert set(trace.sessions) == {"main", "sub1", "sub2"}
    requests = trace.requests()
    assert [r.prompt_tokens for r in requests] == [32, 20, 20, 48]
    # In order of the earliest arrivals: c starts with a's answer, b 0.5 s later.
    assert [r.output_tokens for r in requests] == [5, 4, 3, 2]
    assert trace.after() == {
        1: Dependency((0,), 0.0, 0.0),
        2: Dependency((0,), 0.5, 0.0),
        3: Dependency((2, 1), 0.25, 1.5),
    }
    assert [shared(requests[0], requests[3]), shared(requests[1], requests[2])] == [32, 16]


def test_agentic_mooncake_trace_runs(tmp_path: Path) -> None:
    scenario = Scenario.model_validate(
        {
            "name": "agents",
            "workload": {"trace": str(written(tmp_path, AGENT))},
            "engine": {
                "name": "vllm",
                "num_gpu_blocks": 64,
                "max_model_len": 128,
                "async_scheduling": False,
            },
            "profile": "unit-step",
        }
    )
    found = run_scenario(scenario, tmp_path)
    ends = {i: life.ended_at for i, life in found.record.requests.items()}
    # A step takes 1 s. The agent arrives at 1 s; its first turn takes 5 s.
    assert found.run.clients.arrived == pytest.approx({0: 1.0, 1: 6.0, 2: 6.5, 3: 11.75})
    assert ends[3] == pytest.approx(13.75)
    assert found.summary["sessions"]["shares"]["tools"] == pytest.approx(100 * 1.5 / 12.75)


def test_conversion_keeps_the_graph(tmp_path: Path) -> None:
    first = read_trace(path := written(tmp_path, AGENT))
    for name in ("out.csv", "out.csv.gz"):
        convert_trace(TraceReader(path), tmp_path / name)
        again = read_trace(tmp_path / name)
        assert again.after() == first.after()
        assert again.requests() == first.requests()
    header = (tmp_path / "out.csv").read_text().splitlines()[0]
    assert "tool_time,waits_for" in header


def test_conversion_to_parquet_keeps_the_graph(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    first = read_trace(path := written(tmp_path, AGENT))
    convert_trace(TraceReader(path), tmp_path / "out.parquet")
    assert read_trace(tmp_path / "out.parquet").after() == first.after()


def test_a_request_that_was_not_selected_is_not_waited_for(tmp_path: Path) -> None:
    path = written(tmp_path, AGENT)
    trace = read_trace(path, Selection(start=1.2))
    assert len(trace) == 2
    assert trace.after() == {1: Dependency((0,), 0.25, 1.5)}


@pytest.mark.parametrize(
    ("row", "change", "message"),
    [
        (1, {"wait_for": ["z"]}, ":2: wait_for: should be request ids of this trace; found 'z'"),
        (1, {"wait_for": "a"}, ":2: wait_for: should be a list of request ids; found 'a'"),
        (1, {"wait_for": ["d"]}, ":2: wait_for: should not lead back to the request; found a cyc"),
        (2, {"request_id": "b"}, ":3: request_id: should be unique; found 'b' of line 2"),
        (2, {"request_id": None}, ":3: request_id: should be a name; found None"),
        (0, {"timestamp": None}, ":1: timestamp: should be a number of at least 0; found None"),
        (3, {"tool_wait_ms": -1}, ":4: tool_wait_ms: should be a number of at least 0; found -1"),
        (3, {"delay": "1"}, ":4: delay: should be a number of at least 0; found '1'"),
        (3, {"input_length": None}, ":4: input_length: should be a whole number"),
        (3, {"hash_ids": [1]}, ":4: hash_ids: should contain one id per block of 16 tokens"),
    ],
)
def test_bad_agentic_rows_are_refused_by_line(
    tmp_path: Path, row: int, change: dict[str, Any], message: str
) -> None:
    rows = [one | change if index == row else one for index, one in enumerate(AGENT)]
    with pytest.raises(InputError) as caught:
        read_trace(written(tmp_path, rows))
    assert message in str(caught.value)


def test_rows_that_wait_for_a_bad_row_are_left_out_too(tmp_path: Path) -> None:
    rows = [one | {"timestamp": -1} if one["request_id"] == "a" else one for one in AGENT]
    rows.append(AGENT[0] | {"request_id": "e"})
    trace = read_trace(written(tmp_path, rows), Selection(skip_bad=True))
    assert len(trace) == 1
    assert trace.tally.bad.total() == 4


def test_prompts_of_a_log_grow_by_turns(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text(GROWN)
    convert_trace(TraceReader(path, columns=parse_columns(COLUMNS)), tmp_path / "out.csv")
    trace = read_trace(tmp_path / "out.csv")
    requests = trace.requests()
    assert [r.prompt_tokens for r in requests] == [100, 50, 130, 150]
    assert trace.after() == {2: Dependency((0,), 0.0), 3: Dependency((2,), 0.0)}
    assert requests[2].segments == (
        Segment("u0", 0, 100),
        Segment("o0", 0, 10),
        Segment("u2", 0, 20),
    )
    # The third turn adds no tokens of its own to the 130 and 20 before it.
    assert requests[3].segments == (*requests[2].segments, Segment("o2", 0, 20))


def test_turns_with_times_start_at_these(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text("sid,turn,ISL,OSL,arrival,think_time\nx,1,9,1,0,\nx,2,12,1,5,\nx,3,20,1,8,2\n")
    convert_trace(TraceReader(path, columns=parse_columns(COLUMNS)), tmp_path / "out.csv")
    trace = read_trace(tmp_path / "out.csv")
    assert trace.after() == {2: Dependency((1,), 2.0)}
    assert shared(*trace.requests()[:2]) == 9


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("x,2,160,1,0", ":6: turn: should be above turn 5 of line 5; found 2"),
        ("x,6,156,1,0", ":6: prompt_tokens: should be at least the 157 tokens of prompt and ans"),
        ("x,six,200,1,0", ":6: turn: should be a whole number"),
        ("x,6,200,1,-1", ":6: ttft: should be a number of at least 0; found '-1'"),
    ],
)
def test_bad_turns_are_refused_by_line(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "log.csv"
    path.write_text(GROWN + line + "\n")
    columns = parse_columns(COLUMNS + ",ttft=TTFT")
    with pytest.raises(InputError) as caught:
        list(TraceReader(path, columns=columns))
    assert message in str(caught.value)
    some = list(TraceReader(path, Selection(skip_bad=True), columns=columns))
    assert sum(map(len, some)) == 4


def test_measured_ttfts_are_summarized(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text(GROWN)
    reader = TraceReader(path, columns=parse_columns(COLUMNS + ",ttft=TTFT"))
    convert_trace(reader, tmp_path / "out.csv")
    [note] = reader.tally.lines()
    assert note.startswith("measured TTFT of 4 rows: mean 0.175 s, P50 0.15 s, P95 0.285 s")


def test_turns_require_sessions() -> None:
    with pytest.raises(InputError, match="the column turn requires the column session"):
        parse_columns("turn=t")


@pytest.mark.parametrize(
    ("waits", "found"),
    [
        ("2", "numbers of earlier rows, below 2; found 2"),
        ("-1", "numbers of rows separated by blanks; found '-1'"),
    ],
)
def test_bad_references_in_simkv_traces_are_refused_by_line(
    tmp_path: Path, waits: str, found: str
) -> None:
    path = tmp_path / "trace.csv"
    rows = f"0,9,1,\n1,9,1,0\n2,9,1,{waits}\n"
    path.write_text("arrival,prompt_tokens,output_tokens,waits_for\n" + rows)
    with pytest.raises(InputError) as caught:
        read_trace(path)
    assert f"trace.csv:4: waits_for: should be {found}" in str(caught.value)
    assert len(read_trace(path, Selection(skip_bad=True))) == 2
