"""Tests of the host time of steps in addition to their kernels, measured from a record with known
costs.
"""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest
import simpy
from typer.testing import CliRunner

from simkv.cli import app
from simkv.core.errors import InputError
from simkv.costs.cost_profile import CostProfile, CostTerm, LinearPiece
from simkv.costs.simulated_executor import SimulatedExecutor
from simkv.schedulers.engine_registry import build_scheduler
from simkv.sim.client_loop import run_clients
from simkv.sim.engine import Engine
from simkv.validation.recorded_runs.host_gaps import describe_host_times, host_times
from simkv.validation.recorded_runs.paced_replay import replay_paced
from simkv.validation.recorded_runs.recorded_run import RecordedRun, read_recorded_run
from simkv.validation.recorded_runs.run_simulation import engine_of, requests_of
from tests.validation.test_recorded_runs import (
    ENGINE,
    FACTS,
    TRUTH,
    profile,
    recorded,
    write,
)

#: Time (s) that the invented host needs for a step that is launched kernel by kernel.
HOST = 4e-3
#: The largest CUDA graph of eight sequences.
LARGEST = 16


def slower(costs: CostProfile) -> CostProfile:
    pieces = [LinearPiece(up_to=LARGEST, base=0.0), LinearPiece(base=HOST)]
    term = CostTerm(name="host", feature="tokens", when="prefill", pieces=pieces)
    return costs.model_copy(update={"terms": [*costs.terms, term]})


def made(folder: Path, costs: CostProfile) -> RecordedRun:
    """Return a record of requests under load, with the times of an engine with the given step
    costs.
    """
    rows = [
        [i, "constant", 0.11 * i + 0.013 * (i % 5), 90 + 61 * (i % 13), 20 + 7 * (i % 11)]
        for i in range(120)
    ]
    case = read_recorded_run(write(folder, [[*row, 0, 1, 1, 1] for row in rows]))
    sent = requests_of(case)
    engine = Engine(
        simpy.Environment(), build_scheduler(engine_of(case)[0]), SimulatedExecutor(costs)
    )
    record = run_clients(engine, sent, None)
    lives = [record.requests[request.id] for request in sent]
    queued = pd.Series([life.received_at for life in lives])
    decided = pd.Series([record.steps.decided[life.segments[0].first] for life in lives])
    first = pd.Series([life.first_token for life in lives])
    last = pd.Series([life.last_token for life in lives])
    table = case.requests[["id", "stage", "arrival_s", "prompt_tokens", "output_tokens"]].assign(
        queued_s=queued,
        queue_ms=1e3 * (decided - queued),
        ttft_ms=1e3 * (first - queued),
        e2e_ms=1e3 * (last - queued),
    )
    table.to_csv(folder / "requests.csv", index=False)
    return read_recorded_run(folder)


def test_only_the_planted_host_time_is_found(tmp_path: Path) -> None:
    found = host_times(made(tmp_path / "x", slower(profile())), profile())
    over = found.kind("mixed, over the largest CUDA graph")
    assert over.steps > 80
    assert over.host == pytest.approx(HOST, rel=0.05)
    for kind in found.kinds:
        if "decodes" in kind.kind:
            assert abs(kind.host) < 1e-4, kind
    assert found.counted > 0.9 * found.intervals
    assert "'mixed, over the largest CUDA graph' took 4.0 ms longer" in describe_host_times(found)
    # The host's own term is not a kernel, so the table is the same with it.
    assert (
        host_times(made(tmp_path / "y", slower(profile())), slower(profile())).kinds == found.kinds
    )


def test_replay_at_recorded_pace_has_the_recorded_steps(tmp_path: Path) -> None:
    case = made(tmp_path / "x", profile())
    steps = replay_paced(case, profile(), engine_of(case)[0])
    assert all(step.sure for step in steps)
    emitted = sum(step.load.emits for step in steps)
    assert emitted == case.requests["output_tokens"].sum()


def test_several_ranks_and_missing_times_are_rejected(tmp_path: Path) -> None:
    case = made(tmp_path / "x", profile())
    engine = {**ENGINE, "data_parallel": 2}
    (tmp_path / "x" / "case.json").write_text(json.dumps({**FACTS, "engine": engine}))
    with pytest.raises(InputError, match="the rank of each request is not recorded"):
        host_times(read_recorded_run(tmp_path / "x"), profile())
    without = case.requests.drop(columns="queued_s")
    without.to_csv(tmp_path / "x" / "requests.csv", index=False)
    (tmp_path / "x" / "case.json").write_text(json.dumps(FACTS))
    with pytest.raises(InputError, match="missing queued_s or prefill_ms"):
        host_times(read_recorded_run(tmp_path / "x"), profile())
    without = case.requests.drop(columns="queue_ms")
    without.to_csv(tmp_path / "x" / "requests.csv", index=False)
    with pytest.raises(InputError, match="queue_ms: not recorded for all requests"):
        host_times(read_recorded_run(tmp_path / "x"), profile())


def test_the_command_prints_the_table_and_writes_it(tmp_path: Path) -> None:
    folder = tmp_path / "x"
    made(folder, profile())
    costs = tmp_path / "costs.json"
    costs.write_text(profile().model_dump_json())
    arguments = ["validate", str(folder), "--profile", str(costs), "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(app, [*arguments, "--host-times"])
    assert done.exit_code == 0, done.output
    assert "Host time above the kernel times, by kind of step" in done.output
    table = pd.read_csv(tmp_path / "out" / "steps.csv")
    assert set(table["case"]) == {"made-up"}
    assert table["host_ms"].abs().max() < 0.1
    assert CliRunner().invoke(app, arguments).exit_code == 0
    assert not (tmp_path / "out" / "steps.csv").exists()


@recorded
def test_on_the_rtx_pro_6000_only_steps_without_graph_take_longer() -> None:
    from simkv.validation.recorded_runs.run_calibration import calibrate_run

    case = read_recorded_run(TRUTH / "lss-rtxpro6000-llama3.1-8b")
    found = host_times(case, calibrate_run(case))
    assert 1e-3 < found.kind("mixed, over the largest CUDA graph").host < 8e-3
    assert abs(found.kind("33 to 128 decodes").host) < 1e-3
