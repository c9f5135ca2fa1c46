"""Tests of version 2 of agentic Mooncake traces: dependencies on dispatch and completion."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from simkv.core.errors import InputError
from simkv.metrics.scenario_runner import run_scenario
from simkv.scenario.scenario import Scenario
from simkv.workload.clients import Dependency
from simkv.workload.trace_conversion import convert_trace
from simkv.workload.trace_reader import TraceReader, read_trace
from simkv.workload.trace_selection import Selection
from tests.workload.test_session_traces import shared

HEADER: dict[str, Any] = {
    "schema": "dynamo.agentic_mooncake",
    "version": 2,
    "block_size": 16,
    "hash_id_scope": "local",
    "source": {"format": "written-for-this-test", "digest": "0"},
}


def on(request: str, delay: float, trigger: str = "completion", relation: str = "") -> Any:
    relation = relation or ("sequence" if trigger == "completion" else "spawn")
    return {"request_id": request, "trigger": trigger, "delay_ms": delay, "relation": relation}


def row(name: str, prompt: int, hashes: list[int], *dependencies: Any, **more: Any) -> Any:
    return {
        "request_id": name,
        "play_id": "p",
        "session_id": "main",
        "model": "m",
        "input_length": prompt,
        "output_length": 5,
        "hash_ids": hashes,
        "not_before_ms": 0.0,
        "dependencies": list(dependencies),
        **more,
    }


#: A play: a turn, a sub-agent after it, a call 0.2 s after the dispatch of this sub-agent's call,
#: and a join. Another play with the same ids of blocks.
ROWS: list[dict[str, Any]] = [
    HEADER,
    row("a", 32, [1, 2], not_before_ms=1000.0),
    row("b", 20, [7, 8], on("a", 500), session_id="sub"),
    row("c", 20, [7, 9], on("b", 200, "dispatch"), session_id="sub2"),
    row("d", 48, [1, 2, 3], on("b", 250, relation="join"), on("c", 250, relation="join")),
    row("e", 32, [1, 2], play_id="q", not_before_ms=1500.0),
    row("f", 33, [1, 2, 4], on("e", 300, "dispatch"), play_id="q", session_id="sub"),
]


def written(folder: Path, rows: list[dict[str, Any]]) -> Path:
    path = folder / "agents.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in rows), encoding="utf-8")
    return path


def changed(index: int, **fields: Any) -> list[dict[str, Any]]:
    return [one | fields if number == index else one for number, one in enumerate(ROWS)]


def test_dependencies_become_waits(tmp_path: Path) -> None:
    trace = read_trace(path := written(tmp_path, ROWS))
    assert trace.format == "mooncake-agentic-v2"
    requests = trace.requests()
    # a at 1.0, b 0.5 s after its answer; e at 1.5, c 0.7 s after a's answer; f at 1.5 + 0.3.
    assert [r.prompt_tokens for r in requests] == [32, 20, 32, 20, 33, 48]
    assert [requests[n].arrival for n in (0, 2, 4)] == pytest.approx([1.0, 1.5, 1.8])
    assert trace.after() == {
        1: Dependency((0,), 0.5, 0.0),
        3: Dependency((0,), 0.7, 0.0),
        5: Dependency((1, 3), 0.25, 0.0),
    }
    assert set(trace.sessions) == {"p/main", "p/sub", "p/sub2", "q/main", "q/sub"}
    # Ids of blocks belong to a play.
    assert [shared(requests[0], requests[n]) for n in (1, 2, 5)] == [0, 0, 32]
    assert [shared(requests[2], requests[4]), shared(requests[1], requests[3])] == [32, 16]
    assert trace.tally.lines() == ["ignored fields: model"]
    convert_trace(TraceReader(path), tmp_path / "out.csv")
    again = read_trace(tmp_path / "out.csv")
    assert (again.after(), again.requests()) == (trace.after(), requests)


def test_waits_that_simkv_approximates_are_noted(tmp_path: Path) -> None:
    rows = changed(4, dependencies=[on("b", 250), on("c", 900)])
    rows[2] = rows[2] | {"not_before_ms": 9000.0}
    trace = read_trace(written(tmp_path, rows))
    requests = trace.requests()
    (join,) = (one.id for one in requests if one.prompt_tokens == 48)
    assert trace.after()[join].think_time == pytest.approx(0.9)
    told = trace.tally.lines()
    assert "1 requests wait with several delays; simkv uses the longest" in told
    assert told[-1].startswith("1 requests have a start time after their dependencies")


def test_a_trace_of_version_2_runs(tmp_path: Path) -> None:
    scenario = Scenario.model_validate(
        {
            "name": "agents",
            "workload": {"trace": str(written(tmp_path, ROWS[:5]))},
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
    # A step takes 1 s. c starts while b runs, in the step that begins at 7.5 s.
    assert found.run.clients.arrived == pytest.approx({0: 1.0, 1: 6.5, 2: 6.7, 3: 12.75})
    assert found.summary["sessions"]["count"] == 1


@pytest.mark.parametrize(
    ("index", "change", "message"),
    [
        (0, {"schema": "other"}, ":1: schema: should be dynamo.agentic_mooncake; found 'other'"),
        (0, {"version": 3}, ":1: version: should be 2; found 3"),
        (0, {"block_size": 0}, ":1: block_size: should be at least 1; found 0"),
        (0, {"hash_id_scope": "global"}, ":1: hash_id_scope: should be local; found 'global'"),
        (2, {"request_id": ""}, ":3: request_id: should be a name; found ''"),
        (2, {"play_id": None}, ":3: play_id: should be a name; found None"),
        (2, {"not_before_ms": -1}, ":3: not_before_ms: should be a number of at least 0; found -1"),
        (2, {"input_length": "9"}, ":3: input_length: should be a whole number"),
        (2, {"hash_ids": [1, 2, 3]}, ":3: hash_ids: should be at most 2 ids, one per block of 16"),
        (2, {"dependencies": {}}, ":3: dependencies: should be a list; found {}"),
        (2, {"dependencies": [3]}, ":3: dependencies[0]: should be an object; found 3"),
        (2, {"dependencies": [on("a", -1)]}, ":3: dependencies[0].delay_ms: should be a number"),
        (2, {"dependencies": [on("a", 1, "end")]}, ":3: dependencies[0].trigger: should be disp"),
        (2, {"dependencies": [{"request_id": 1}]}, ":3: dependencies[0].request_id: should be a r"),
        (2, {"dependencies": [on("z", 1)]}, ":3: dependencies: should be request ids of this trac"),
        (2, {"dependencies": [on("c", 1)]}, ":3: dependencies: should not lead back to the reque"),
        (2, {"request_id": "a"}, ":3: request_id: should be unique; found 'a' of line 2"),
    ],
)
def test_bad_rows_of_version_2_are_refused_by_line(
    tmp_path: Path, index: int, change: dict[str, Any], message: str
) -> None:
    rows = [ROWS[0], *ROWS[1:5]]
    rows[index] = rows[index] | change
    with pytest.raises(InputError) as caught:
        read_trace(written(tmp_path, rows))
    assert message in str(caught.value)
    assert str(caught.value).startswith(str(tmp_path / "agents.jsonl"))


def test_a_trace_needs_its_header_first(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        read_trace(written(tmp_path, [*ROWS[1:3], ROWS[0]]))
    assert ":1: schema: should be in a header before the requests" in str(caught.value)


def test_rows_that_wait_for_a_bad_row_are_left_out_too(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, changed(1, not_before_ms=-1)), Selection(skip_bad=True))
    assert [request.prompt_tokens for request in trace.requests()] == [32, 33]
    assert (trace.tally.rows, trace.tally.bad.total()) == (6, 4)
