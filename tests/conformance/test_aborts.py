"""Tests of recordings with aborted requests, and of names of releases in headers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import simpy

from simkv.conformance.decision_recorder import Recorder, write_decision_trace
from simkv.conformance.decision_replay import check_trace
from simkv.conformance.decision_trace import DecisionTrace, TraceError, read_trace
from simkv.costs.cost_profile import load_profile
from simkv.costs.simulated_executor import SimulatedExecutor
from simkv.scenario.scenario import Scenario
from simkv.schedulers import engine_registry
from simkv.sim.client_loop import run_clients
from simkv.sim.engine import Engine
from simkv.workload.workload_section import generate_requests
from tests.conformance.recordings import Committed, of_kind

GONE = of_kind("vllm", "0.27.0", "gone-")

Lines = list[dict[str, Any]]


def recorded(folder: Path, engine: dict[str, Any], requests: Lines) -> Path:
    """Record a simulated run."""
    workload = {"requests": requests}
    given = {"name": "t", "workload": workload, "engine": engine, "profile": "unit-step"}
    scenario = Scenario.model_validate(given)
    recorder = Recorder(engine_registry.build_scheduler(scenario.engine), scenario.engine)
    executor = SimulatedExecutor(load_profile("unit-step"))
    asked = generate_requests(scenario.workload, scenario.timeout)
    run_clients(Engine(simpy.Environment(), recorder, executor, leaping=False), asked, 100.0)
    write_decision_trace(folder / "t.jsonl.gz", recorder, asked)
    return folder / "t.jsonl.gz"


def changed(folder: Path, recording: Committed, change: Any) -> DecisionTrace:
    """Return a recording after ``change`` was applied to its lines."""
    return read_trace(recording.write(folder / "changed.jsonl", change))


def burst(count: int, timeouts: dict[int, float]) -> Lines:
    plain = {"arrival": 0.0, "prompt_tokens": 12, "output_tokens": 12}
    return [plain | ({"timeout": timeouts[i]} if i in timeouts else {}) for i in range(count)]


VLLM = {"name": "vllm", "block_size": 4, "num_gpu_blocks": 10, "max_model_len": 32}
ENGINES = {
    "synchronous": {**VLLM, "async_scheduling": False},
    "asynchronous": VLLM,
    "0.12": {**VLLM, "variant": "0.12"},
    "mistralrs": {"name": "mistralrs", "block_size": 4, "num_gpu_blocks": 10},
    "sglang": {"name": "sglang", "max_total_num_tokens": 40, "max_running_requests": 3},
    "trtllm": {"name": "trtllm", "max_tokens_in_paged_kv_cache": 40, "tokens_per_block": 4},
}


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
def test_a_run_with_timeouts_is_replayed(tmp_path: Path, engine: dict[str, Any]) -> None:
    # Request 0 is aborted during a step in which it runs, and request 3 is aborted while it waits.
    path = recorded(tmp_path, engine, burst(4, {0: 4.5, 3: 2.5}))
    trace = read_trace(path)
    assert {i for _, _, i in trace.header["aborts"]} == {0, 3}
    assert sorted(i for line in trace.steps for i in line.get("aborted", ())) == [0, 3]
    assert check_trace(trace).difference is None
    header = {name: value for name, value in trace.header.items() if name != "aborts"}
    assert check_trace(replace(trace, header=header)).difference is not None


@pytest.mark.parametrize("recording", GONE, ids=lambda recording: recording.case)
def test_a_later_abort_changes_decisions(tmp_path: Path, recording: Committed) -> None:
    def leaves_later(lines: Lines) -> None:
        there = {i for line in lines[1:] for i in line.get("aborted", ())}
        lines[0]["aborts"] = [
            (step + (i in there), phase, i) for step, phase, i in lines[0]["aborts"]
        ]

    if any("aborted" in line for line in recording.trace().steps):
        assert check_trace(changed(tmp_path, recording, leaves_later)).difference is not None


def test_an_abort_before_arrival_or_after_the_end_is_ignored(tmp_path: Path) -> None:
    def more(lines: Lines) -> None:
        ends = {i: line["step"] for line in lines[1:] for i in line["finished"]}
        i, step = min(ends.items(), key=lambda item: item[1])
        comes = {r["id"]: r["arrival_step"] for r in lines[0]["requests"]}
        late = max(comes, key=lambda i: comes[i])
        lines[0]["aborts"] = [*lines[0]["aborts"], [step + 1, 1, i], [comes[late], 0, late]]

    assert check_trace(changed(tmp_path, GONE[0], more)).difference is None


@pytest.mark.parametrize("name", ["0.27", "0.27.0", "0.27.1", "0.27.9"])
def test_headers_accept_every_form_of_a_release_name(tmp_path: Path, name: str) -> None:
    def called(lines: Lines) -> None:
        lines[0]["variant"] = name
        del lines[0]["config"]["variant"]

    assert check_trace(changed(tmp_path, GONE[0], called)).difference is None


@pytest.mark.parametrize("name", ["0.8", "0.99", "0.270", "1.27", "0.27.x", "0.27.1.1", "0"])
def test_rejects_unknown_releases(tmp_path: Path, name: str) -> None:
    def called(lines: Lines) -> None:
        lines[0]["variant"] = name
        del lines[0]["config"]["variant"]

    with pytest.raises(TraceError, match=r"expected a release of vLLM from 0\.\d+ to 0"):
        check_trace(changed(tmp_path, GONE[0], called))
