"""Tests of recorded agents: Weka's traces, turns of aiperf, and OpenTelemetry spans of agents."""

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
from simkv.workload.formats.recorded_dependencies import RecordedCall, infer_waits
from simkv.workload.trace_conversion import convert_trace
from simkv.workload.trace_reader import Trace, TraceReader, read_trace
from simkv.workload.trace_selection import Selection


def call(t: float, prompt: int, output: int, ids: list[int], **more: Any) -> dict[str, Any]:
    """Return a call as in Weka's traces."""
    return {"t": t, "type": "s", "model": "m", "in": prompt, "out": output, "hash_ids": ids, **more}


#: An agent that starts two sub-agents, one of which is still at work when its next turn starts.
WEKA: dict[str, Any] = {
    "id": "one",
    "models": ["m", "small"],
    "block_size": 64,
    "hash_id_scope": "local",
    "tool_tokens": 64,
    "system_tokens": 0,
    "requests": [
        call(0.0, 128, 10, [1, 2], api_time=2.0, stop="tool_use", output_types=["tool_use"]),
        {
            "t": 3.0,
            "type": "subagent",
            "agent_id": "agent_001",
            "subagent_type": "Explore",
            "status": "completed",
            "models": ["small"],
            "requests": [
                call(3.0, 70, 5, [1, 3], api_time=1.0, type="n"),
                call(4.5, 128, 5, [1, 4], api_time=1.0, input_types=["tool_result"]),
            ],
        },
        {
            "t": 3.0,
            "type": "subagent",
            "agent_id": "agent_002",
            "subagent_type": "Explore",
            "status": "async_launched",
            "models": ["small"],
            "requests": [call(3.5, 70, 5, [1, 5], api_time=9.0)],
        },
        call(7.5, 192, 20, [1, 2, 6], api_time=2.0, input_types=["tool_result"], think_time=2.0),
        call(20.0, 256, 20, [1, 2, 6, 7], input_types=["text"]),
    ],
}
OTHER: dict[str, Any] = {
    "id": "two",
    "models": ["m"],
    "block_size": 64,
    "requests": [call(0.0, 128, 7, [1, 2]), call(4.0, 192, 8, [1, 2, 3])],
}


def written(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def shared(one: Request, other: Request) -> int:
    first = one.segments or (Segment(f"u{one.id}", 0, one.prompt_tokens),)
    return count_shared(first, other.segments)


def by_length(trace: Trace) -> dict[int, Any]:
    """Return the awaited prompts and the delays of each request, by its prompt (if unique)."""
    prompts = [request.prompt_tokens for request in trace.requests()]
    return {
        prompts[number]: ([prompts[one] for one in wait.before], wait.think_time, wait.tool_time)
        for number, wait in trace.after().items()
    }


def test_weka_sessions_become_graphs(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path / "traces.jsonl", [WEKA, OTHER]))
    assert trace.format == "weka"
    requests = trace.requests()
    assert [(r.arrival, r.prompt_tokens, r.output_tokens) for r in requests] == [
        (0.0, 128, 10), (0.0, 128, 7), (3.0, 70, 5), (3.5, 70, 5), (4.0, 192, 8),
        (4.5, 128, 5), (7.5, 192, 20), (20.0, 256, 20),
    ]  # fmt: skip
    assert trace.after() == {
        2: Dependency((0,), 0.0, 1.0),  # after a call that stopped to use a tool
        3: Dependency((0,), 0.0, 1.5),
        4: Dependency((1,), 4.0, 0.0),  # no api_time: from start to start
        5: Dependency((2,), 0.0, 0.5),
        6: Dependency((5,), 0.0, 2.0),  # does not wait for the second sub-agent
        7: Dependency((6, 3), 7.5, 0.0),
    }
    assert set(trace.sessions) == {"one", "one::sa:agent_001", "one::sa:agent_002", "two"}
    # Hash ids are local to a session, but shared between its agents.
    assert [shared(requests[0], requests[n]) for n in (1, 2, 6)] == [0, 64, 128]


def test_weka_ids_of_global_scope_are_shared(tmp_path: Path) -> None:
    records = [one | {"hash_id_scope": "global"} for one in (WEKA, OTHER)]
    requests = read_trace(written(tmp_path / "traces.jsonl", records)).requests()
    assert shared(requests[0], requests[1]) == 128


def test_raw_weka_times_of_sub_agents_count_from_their_start(tmp_path: Path) -> None:
    raw = json.loads(json.dumps(WEKA))
    for agent in raw["requests"][1:3]:
        for one in agent["requests"]:
            one["t"] -= agent["t"]
    first = read_trace(written(tmp_path / "absolute.jsonl", [WEKA, OTHER]))
    again = read_trace(written(tmp_path / "raw.jsonl", [raw, OTHER]))
    assert again.after() == first.after()
    assert again.requests() == first.requests()


def test_weka_folder_of_indented_files_and_conversion(tmp_path: Path) -> None:
    folder = tmp_path / "traces"
    (folder / "part").mkdir(parents=True)
    for one in (WEKA, OTHER):
        (folder / "part" / f"trace_{one['id']}.json").write_text(json.dumps(one, indent=2))
    first = read_trace(written(tmp_path / "traces.jsonl", [WEKA, OTHER]))
    assert read_trace(folder).requests() == first.requests()
    convert_trace(TraceReader(folder), tmp_path / "out.csv")
    again = read_trace(tmp_path / "out.csv")
    assert (again.after(), again.requests()) == (first.after(), first.requests())


def test_weka_trace_runs(tmp_path: Path) -> None:
    scenario = Scenario.model_validate(
        {
            "name": "agents",
            "workload": {"trace": str(written(tmp_path / "t.jsonl", [WEKA, OTHER]))},
            "engine": {
                "name": "vllm",
                "num_gpu_blocks": 200,
                "max_model_len": 512,
                "async_scheduling": False,
            },
            "profile": "unit-step",
        }
    )
    found = run_scenario(scenario, tmp_path)
    ends = {number: life.ended_at or 0.0 for number, life in found.record.requests.items()}
    arrived = found.run.clients.arrived
    assert ends[0] == pytest.approx(10.0)  # a step takes 1 s
    assert [arrived[2], arrived[3]] == pytest.approx([11.0, 11.5])
    assert arrived[6] == pytest.approx(ends[5] + 2.0)
    assert arrived[7] == pytest.approx(max(ends[6], ends[3]) + 7.5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_size": 0}, "block_size: should be at least 1; found 0"),
        ({"id": ""}, "id: should be a name"),
        ({"id": "one"}, "id: should be unique; found 'one' again"),
        ({"hash_id_scope": "file"}, "hash_id_scope: should be local or global; found 'file'"),
        ({"requests": {}}, "requests: should be a list; found {}"),
        ({"requests": [5]}, "requests[0]: should be an object; found 5"),
        ({"requests": [{"type": "x"}]}, "requests[0].type: should be n, s or subagent; found 'x'"),
        ({"requests": [call(-1, 1, 1, [])]}, "requests[0].t: should be a number of at least 0"),
        ({"requests": [call(0, 64, 1, [1, 2])]}, "requests[0].hash_ids: should be at most 1 ids"),
        ({"requests": [call(0, 64, -1, [1])]}, "requests[0].out: should be a whole number"),
        (
            {"requests": [WEKA["requests"][1] | {"requests": [call(3, 64, 1, ["a"])]}]},  # type: ignore[list-item]
            "requests[0].requests[0].hash_ids: should be a list of whole numbers",
        ),
    ],
)
def test_bad_weka_sessions_are_refused_by_line(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    path = written(tmp_path / "traces.jsonl", [WEKA, OTHER | change])
    with pytest.raises(InputError) as caught:
        read_trace(path)
    assert f"traces.jsonl:2: {message}" in str(caught.value)
    assert len(read_trace(path, Selection(skip_bad=True))) == 6


def turn(
    session: str, index: int, start: float, end: float, prompt: int, output: int, **more: Any
) -> dict[str, Any]:
    """Return a record of aiperf; times are in s."""
    zero = 1759813207532900363
    metadata = {
        "session_num": 0,
        "x_request_id": f"{session}-{index}",
        "x_correlation_id": session,
        "conversation_id": "c",
        "turn_index": index,
        "request_start_ns": zero + round(1e9 * start),
        "request_end_ns": zero + round(1e9 * end),
        "benchmark_phase": "profiling",
        "was_cancelled": False,
        **more,
    }
    lengths = {"input_sequence_length": prompt, "output_sequence_length": output}
    metrics = {name: {"value": value, "unit": "tokens"} for name, value in lengths.items()}
    return {"metadata": metadata, "metrics": metrics, "error": None}


TURNS = [
    turn("y", 0, 0.5, 1.5, 50, 5),  # in order of the ends, as aiperf writes them
    turn("x", 0, 0.0, 2.0, 100, 10),
    turn("sub", 0, 2.5, 4.0, 30, 3, parent_correlation_id="x", agent_depth=1),
    turn("x", 1, 5.0, 6.0, 130, 20),
    turn("x", 2, 6.5, 7.0, 90, 5),  # shorter than the context: compacted
]


def test_aiperf_turns_wait_for_each_other(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path / "profile_export.jsonl", TURNS))
    assert trace.format == "aiperf"
    requests = trace.requests()
    assert [r.arrival for r in requests] == pytest.approx([0.0, 0.5, 2.5, 5.0, 6.5])
    assert by_length(trace) == {
        30: ([100], pytest.approx(0.5), 0.0),
        130: ([30], pytest.approx(1.0), 0.0),
        90: ([130], pytest.approx(0.5), 0.0),
    }
    assert [shared(requests[0], requests[n]) for n in (1, 2, 3, 4)] == [0, 0, 100, 0]


def test_aiperf_prompts_repeat_the_turn_before(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path / "p.jsonl", [TURNS[1], *TURNS[3:]]))
    requests = trace.requests()
    assert requests[1].segments == (
        Segment("u0", 0, 100),
        Segment("o0", 0, 10),
        Segment("u1", 0, 20),
    )
    assert requests[2].segments == ()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"turn_index": 0}, "turn_index: should be above turn 0 of line 2; found 0"),
        ({"turn_index": -1}, "turn_index: should be a whole number from 0"),
        ({"request_end_ns": None}, "request_end_ns: should be at least request_start_ns in a ses"),
        ({"request_end_ns": "a"}, "request_end_ns: should be a number of at least 0; found 'a'"),
    ],
)
def test_bad_aiperf_turns_are_refused_by_line(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    bad = TURNS[3] | {"metadata": TURNS[3]["metadata"] | change}
    path = written(tmp_path / "p.jsonl", [*TURNS[:3], bad, TURNS[4]])
    with pytest.raises(InputError) as caught:
        read_trace(path)
    assert f"p.jsonl:4: {message}" in str(caught.value)
    assert len(read_trace(path, Selection(skip_bad=True))) == 4


def span(
    operation: str, own: str, parent: str, start: float, end: float, **more: Any
) -> dict[str, Any]:
    """Return a span with the conventions for generative AI."""
    attributes = [{"key": "gen_ai.operation.name", "value": {"stringValue": operation}}]
    for key, value in more.items():
        kind = "intValue" if isinstance(value, int) else "stringValue"
        attributes.append({"key": key.replace("__", "."), "value": {kind: str(value)}})
    times = {"startTimeUnixNano": start, "endTimeUnixNano": end}
    return {
        "traceId": "t1",
        "spanId": own,
        "parentSpanId": parent,
        "name": f"{operation} x",
        **{name: str(1768922793000000000 + round(1e9 * time)) for name, time in times.items()},
        "attributes": attributes,
    }


def chat(
    own: str, parent: str, start: float, end: float, prompt: int, output: int, **more: Any
) -> dict[str, Any]:
    tokens = {"gen_ai__usage__input_tokens": prompt, "gen_ai__usage__output_tokens": output}
    return span("chat", own, parent, start, end, **{**tokens, **more})


#: An agent with a tool, a sub-agent that it calls as a tool, and a failed call.
SPANS = [
    span("invoke_agent", "a", "", 0.0, 20.0, gen_ai__conversation__id="c7"),
    chat("1", "a", 0.0, 2.0, 100, 10),
    span("execute_tool", "t", "a", 2.5, 4.0),
    chat("2", "a", 4.5, 5.0, 130, 20),
    span("execute_tool", "u", "a", 5.0, 9.0),
    span("invoke_agent", "b", "u", 5.5, 9.0),
    chat("3", "b", 6.0, 8.0, 40, 4),
    chat("4", "a", 10.0, 11.0, 200, 6),
    chat("5", "a", 12.0, 12.5, 0, 0, error__type="timeout"),
]


def otlp(path: Path, spans: list[dict[str, Any]]) -> Path:
    """Write one object per line, as the collector's file exporter does."""
    return written(path, [{"resourceSpans": [{"scopeSpans": [{"spans": [s]}]}]} for s in spans])


def jaeger(path: Path, spans: list[dict[str, Any]]) -> Path:
    """Write the same spans as Jaeger exports them."""
    found = []
    for one in spans:
        start, end = (int(one[f"{name}TimeUnixNano"]) // 1000 for name in ("start", "end"))
        tags = [
            {"key": tag["key"], "value": next(iter(tag["value"].values()))}
            for tag in one["attributes"]
        ]
        above = [{"refType": "CHILD_OF", "traceID": "t1", "spanID": one["parentSpanId"]}]
        found.append(
            {
                "traceID": "t1",
                "spanID": one["spanId"],
                "operationName": one["name"],
                "references": above if one["parentSpanId"] else [],
                "startTime": start,
                "duration": end - start,
                "tags": tags,
            }
        )
    path.write_text(json.dumps({"data": [{"traceID": "t1", "spans": found}]}))
    return path


@pytest.mark.parametrize("write", [otlp, jaeger])
def test_spans_of_agents_become_graphs(tmp_path: Path, write: Any) -> None:
    trace = read_trace(write(tmp_path / "spans.json", SPANS))
    assert trace.format == "otel"
    requests = trace.requests()
    assert [r.arrival for r in requests] == pytest.approx([0.0, 4.5, 6.0, 10.0])
    about = pytest.approx
    assert by_length(trace) == {
        130: ([100], about(1.0, abs=1e-5), about(1.5, abs=1e-5)),
        40: ([130], about(1.0, abs=1e-5), 0.0),
        200: ([40], about(1.0, abs=1e-5), about(1.0, abs=1e-5)),
    }
    assert set(trace.sessions) == {"conversation c7", "conversation c7 agent b"}
    assert [shared(requests[0], requests[n]) for n in (1, 2, 3)] == [100, 0, 100]
    assert shared(requests[1], requests[3]) == 130
    assert "1 with an error (first: line" in " ".join(trace.tally.lines())


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (span("chat", "2", "a", 4, 5, gen_ai__usage__input_tokens=5), "gen_ai.usage.output_tokens"),
        (chat("2", "a", 5, 4, 1, 1), "end: should be a time in 1970 or later, and not before"),
        (chat("2", "a", 4, 5, -3, 1), "gen_ai.usage.input_tokens: should be a number from 0"),
    ],
)
def test_bad_spans_of_agents_are_refused_by_line(
    tmp_path: Path, bad: dict[str, Any], message: str
) -> None:
    path = otlp(tmp_path / "spans.json", [*SPANS[:3], bad, *SPANS[4:]])
    with pytest.raises(InputError) as caught:
        read_trace(path)
    assert f"spans.json:4: {message}" in str(caught.value)
    assert len(read_trace(path, Selection(skip_bad=True))) == 3


def test_a_conversation_continues_in_later_traces(tmp_path: Path) -> None:
    later = [
        span("invoke_agent", "a", "", 30, 40, gen_ai__conversation__id="c7") | {"traceId": "t2"},
        chat("1", "a", 30, 31, 300, 1) | {"traceId": "t2"},
    ]
    trace = read_trace(otlp(tmp_path / "spans.json", [*SPANS, *later]))
    assert by_length(trace)[300][0] == [200]


def test_inferred_waits_preserve_what_ran_in_parallel() -> None:
    """A call that starts during another one does not wait for it, and waits are not repeated."""
    times = [("m", 0, 2), ("m", 1, 5), ("a", 3, 4), ("a", 4, 8), ("m", 6, 7), ("m", 9, 10)]
    calls = [
        RecordedCall(agent, low, high, 1, 1, n, n) for n, (agent, low, high) in enumerate(times)
    ]
    waits = infer_waits(calls, {"a": "m"})
    assert [wait.before for wait in waits] == [(), (), (0,), (2,), (2, 1), (4, 3)]
    assert [wait.delay for wait in waits] == [0, 0, 1, 0, 1, 1]
