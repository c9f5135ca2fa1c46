"""Tests of the trace for ui.perfetto.dev: its structure and its events."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from simkv.cli import app
from simkv.metrics.scenario_runner import run_file
from simkv.report.perfetto_trace import write_perfetto
from simkv.sim.run_record import RunRecord

SCENARIO = """
name: pressure
workload: {burst: {num_prompts: 12, prompt_tokens: 100, output_tokens: 60, interval: 3.0}}
engine: {name: mistralrs, variant: pr2031a, block_size: 16, num_gpu_blocks: 24}
profile: unit-step
timeout: 150
variants:
  mistralrs: {}
  dies: {engine: {variant: pr2034}}
  vllm: {engine: {name: vllm, num_gpu_blocks: 24, max_model_len: 200, max_num_seqs: 8,
                  max_num_batched_tokens: 64}}
  sglang: {engine: {name: sglang, max_total_num_tokens: 400, chunked_prefill_size: 64}}
"""

Trace = list[dict[str, Any]]


@pytest.fixture(scope="module")
def scenario(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("perfetto") / "pressure.yaml"
    path.write_text(SCENARIO, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def records(scenario: Path) -> dict[str, RunRecord]:
    return {name: result.record for name, result in run_file(scenario).items()}


def trace_of(records: dict[str, RunRecord], folder: Path) -> Trace:
    write_perfetto(folder / "trace.json", records, "pressure")
    whole = json.loads((folder / "trace.json").read_text(encoding="utf-8"))
    assert whole["displayTimeUnit"] == "ms"
    assert whole["otherData"]["scenario"] == "pressure"
    events: Trace = whole["traceEvents"]
    return events


@pytest.fixture(scope="module")
def trace(records: dict[str, RunRecord], tmp_path_factory: pytest.TempPathFactory) -> Trace:
    return trace_of(records, tmp_path_factory.mktemp("trace"))


def of(trace: Trace, *phases: str) -> Trace:
    return [event for event in trace if event["ph"] in phases]


def threads(trace: Trace) -> dict[tuple[int, int], Trace]:
    """Return the slices by process and thread, the outer slices before the inner slices."""
    found: dict[tuple[int, int], Trace] = defaultdict(list)
    for event in of(trace, "X"):
        found[event["pid"], event["tid"]].append(event)
    for slices in found.values():
        slices.sort(key=lambda event: (event["ts"], -event["dur"]))
    return found


def names(trace: Trace, what: str) -> dict[tuple[int, int], str]:
    return {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in of(trace, "M")
        if event["name"] == what
    }


def test_events_have_the_fields_of_their_phase(trace: Trace) -> None:
    needs = {
        "X": {"name", "cat", "pid", "tid", "ts", "dur", "args"},
        "C": {"name", "pid", "ts", "args"},
        "M": {"name", "pid", "tid", "args"},
        "i": {"name", "s", "pid", "tid", "ts"},
        "s": {"name", "cat", "id", "pid", "tid", "ts"},
        "f": {"name", "cat", "id", "bp", "pid", "tid", "ts"},
    }
    assert {event["ph"] for event in trace} == set(needs)
    for event in trace:
        assert event.keys() == needs[event["ph"]] | {"ph"}
        assert event.get("ts", 0.0) >= 0.0
        assert event.get("dur", 0.0) >= 0.0
    for event in of(trace, "C"):
        assert all(isinstance(value, int) for value in event["args"].values())


def test_trace_has_a_lane_per_request_and_replica(
    trace: Trace, records: dict[str, RunRecord]
) -> None:
    processes = set(names(trace, "process_name").values())
    assert processes == {f"{name}: {part}" for name in records for part in ("engine", "requests")}
    process = {pid: name for (pid, _), name in names(trace, "process_name").items()}
    for variant, record in records.items():
        lanes = {
            name
            for (pid, _), name in names(trace, "thread_name").items()
            if process[pid] == f"{variant}: requests"
        }
        assert lanes == {f"request {i}" for i in record.requests}
    assert threads(trace).keys() <= names(trace, "thread_name").keys()


def test_slices_of_a_thread_nest(trace: Trace) -> None:
    for slices in threads(trace).values():
        open_until: list[float] = []
        for event in slices:
            while open_until and open_until[-1] <= event["ts"]:
                open_until.pop()
            end = round(event["ts"] + event["dur"], 3)
            assert not open_until or end <= open_until[-1]
            open_until.append(end)


def test_times_are_microseconds(records: dict[str, RunRecord], tmp_path: Path) -> None:
    record = records["mistralrs"]
    trace = trace_of({"mistralrs": record}, tmp_path)
    (whole,) = (e for e in of(trace, "X") if e["name"].startswith("request 3:"))
    life = record.requests[3]
    assert life.ended_at is not None
    assert whole["ts"] == life.request.arrival * 1e6 == 9e6
    assert whole["ts"] + whole["dur"] == pytest.approx(life.ended_at * 1e6)
    assert whole["args"]["outcome"] == "finished"
    assert whole["args"]["preemptions"] == len(life.preempted_at)
    steps = [e for e in of(trace, "X") if e["cat"] == "step"]
    assert sum(e["args"]["steps"] for e in steps) == len(record.steps)
    assert sum(e["args"]["preempted"] for e in steps) == sum(record.steps.preempted)
    lasting = sum(
        end - start for start, end in zip(record.steps.start, record.steps.end, strict=True)
    )
    assert sum(e["dur"] for e in steps) == pytest.approx(lasting * 1e6)


def test_states_cover_each_request(trace: Trace) -> None:
    for slices in threads(trace).values():
        if slices[0]["cat"] != "request":
            continue
        whole, *states = slices
        reached = whole["ts"]
        for state in states:
            assert state["cat"] == "state"
            assert state["ts"] >= reached - 1e-3
            reached = state["ts"] + state["dur"]
        assert reached == pytest.approx(whole["ts"] + whole["dur"], abs=1e-3)


def test_arrows_are_paired_and_start_and_end_inside_slices(trace: Trace) -> None:
    starts, ends = ({e["id"]: e for e in of(trace, phase)} for phase in "sf")
    assert starts.keys() == ends.keys()
    assert len(starts) == len(of(trace, "s")) == len(of(trace, "f")) > 0
    slices = threads(trace)
    for number, start in starts.items():
        end = ends[number]
        assert (start["name"], start["cat"]) == (end["name"], end["cat"])
        assert start["ts"] <= end["ts"]
        assert end["bp"] == "e"
        for event in (start, end):
            assert any(
                e["ts"] <= event["ts"] < e["ts"] + e["dur"]
                for e in slices[event["pid"], event["tid"]]
            )


def test_every_preemption_of_a_waiting_client_has_an_arrow(
    records: dict[str, RunRecord], tmp_path: Path
) -> None:
    for name, record in records.items():
        trace = trace_of({name: record}, tmp_path)
        lanes = names(trace, "thread_name")
        found = [lanes[e["pid"], e["tid"]] for e in of(trace, "f")]
        wanted = [
            f"request {i}"
            for i, life in record.requests.items()
            for at in life.preempted_at
            if life.ended_at is not None and at < life.ended_at
        ]
        for request in wanted:
            found.remove(request)
        assert wanted or name == "sglang"


def test_arrows_start_at_the_favored_request(records: dict[str, RunRecord], tmp_path: Path) -> None:
    record = records["mistralrs"]
    trace = trace_of({"mistralrs": record}, tmp_path)
    lanes = names(trace, "thread_name")
    starts = {e["id"]: lanes[e["pid"], e["tid"]] for e in of(trace, "s")}
    ends = {e["id"]: lanes[e["pid"], e["tid"]] for e in of(trace, "f")}
    drawn = [(starts[number], ends[number]) for number in starts]
    for i, life in record.requests.items():
        for cause in life.causes:
            source = "steps" if cause.by is None else f"request {cause.by}"
            assert (source, f"request {i}") in drawn


def test_counters_follow_the_step_log(records: dict[str, RunRecord], tmp_path: Path) -> None:
    record = records["vllm"]
    trace = trace_of({"vllm": record}, tmp_path)
    log, at = record.steps, 0
    held = [e for e in of(trace, "C") if e["name"] == "KV blocks"]
    for row, start in enumerate(log.start):
        while at + 1 < len(held) and held[at + 1]["ts"] <= start * 1e6 + 1e-3:
            at += 1
        assert held[at]["args"] == {"held": record.num_blocks - log.free_blocks[row]}
    assert len(held) < len(log)
    assert {e["name"] for e in of(trace, "C")} == {"KV blocks", "requests"}


def test_same_run_gives_the_same_bytes(scenario: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        records = {variant: result.record for variant, result in run_file(scenario).items()}
        write_perfetto(tmp_path / name, records, "pressure")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_run_without_arrivals_gives_a_trace(tmp_path: Path) -> None:
    trace = trace_of({"empty": RunRecord(num_blocks=4)}, tmp_path)
    assert {event["ph"] for event in trace} == {"M"}


@pytest.mark.parametrize("command", ["run", "report"])
def test_commands_write_the_trace(
    command: str, scenario: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options = ["--no-plots", "--exit-zero"] if command == "run" else ["--no-whatif"]
    target = tmp_path / "trace.json"
    done = CliRunner().invoke(app, [command, str(scenario), "--perfetto", str(target), *options])
    assert done.exit_code == 0, done.output
    assert json.loads(target.read_text(encoding="utf-8"))["traceEvents"]


def test_missing_target_directory_is_an_error(scenario: Path, tmp_path: Path) -> None:
    target = tmp_path / "nowhere" / "trace.json"
    done = CliRunner().invoke(app, ["run", str(scenario), "--perfetto", str(target)])
    assert done.exit_code != 0
    assert "its folder does not exist" in str(done.exception)
