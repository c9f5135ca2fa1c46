"""What steps take above their kernels, measured from a record whose truth is known."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest
import simpy
from typer.testing import CliRunner

from simkv.cli import app
from simkv.core.errors import InputError
from simkv.costs.profile import Piece, Profile, Term
from simkv.costs.simulated import SimulatedExecutor
from simkv.loop.engine import Engine
from simkv.loop.serve import serve
from simkv.proof.validation.cases.case import Case, read_case
from simkv.proof.validation.cases.paced import paced
from simkv.proof.validation.cases.simulate import engine_of, requests_of
from simkv.proof.validation.cases.steps import host_times, step_words
from simkv.schedulers.registry import build
from tests.proof.validation.test_cases import ENGINE, FACTS, TRUTH, profile, recorded, write

#: Seconds that the made-up host takes for a step that is launched kernel by kernel.
HOST = 4e-3
#: The largest CUDA graph of eight sequences.
LARGEST = 16


def slower(costs: Profile) -> Profile:
    pieces = [Piece(up_to=LARGEST, base=0.0), Piece(base=HOST)]
    term = Term(name="host", feature="tokens", when="prefill", pieces=pieces)
    return costs.model_copy(update={"terms": [*costs.terms, term]})


def made(folder: Path, costs: Profile) -> Case:
    """A record of requests under load, with the times of an engine whose steps cost that."""
    rows = [
        [i, "constant", 0.11 * i + 0.013 * (i % 5), 90 + 61 * (i % 13), 20 + 7 * (i % 11)]
        for i in range(120)
    ]
    case = read_case(write(folder, [[*row, 0, 1, 1, 1] for row in rows]))
    sent = requests_of(case)
    engine = Engine(simpy.Environment(), build(engine_of(case)[0]), SimulatedExecutor(costs))
    record = serve(engine, sent, None)
    lives = [record.lives[request.id] for request in sent]
    queued = pd.Series([life.seen for life in lives])
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
    return read_case(folder)


def test_the_planted_host_time_is_found_and_nothing_else(tmp_path: Path) -> None:
    found = host_times(made(tmp_path / "x", slower(profile())), profile())
    over = found.kind("mixed, over the largest CUDA graph")
    assert over.steps > 80
    assert over.host == pytest.approx(HOST, rel=0.05)
    for kind in found.kinds:
        if "decodes" in kind.kind:
            assert abs(kind.host) < 1e-4, kind
    assert found.counted > 0.9 * found.intervals
    assert "mixed, over the largest CUDA graph took 4.0 ms longer" in step_words(found)
    # The host's own term is no kernel: with it the table is the same.
    assert (
        host_times(made(tmp_path / "y", slower(profile())), slower(profile())).kinds == found.kinds
    )


def test_at_its_own_pace_a_record_has_its_own_steps(tmp_path: Path) -> None:
    case = made(tmp_path / "x", profile())
    steps = paced(case, profile(), engine_of(case)[0])
    assert all(step.sure for step in steps)
    emitted = sum(step.load.emits for step in steps)
    assert emitted == case.requests["output_tokens"].sum()


def test_several_ranks_and_missing_times_are_refused(tmp_path: Path) -> None:
    case = made(tmp_path / "x", profile())
    engine = {**ENGINE, "data_parallel": 2}
    (tmp_path / "x" / "case.json").write_text(json.dumps({**FACTS, "engine": engine}))
    with pytest.raises(InputError, match="does not say which served a request"):
        host_times(read_case(tmp_path / "x"), profile())
    without = case.requests.drop(columns="queued_s")
    without.to_csv(tmp_path / "x" / "requests.csv", index=False)
    (tmp_path / "x" / "case.json").write_text(json.dumps(FACTS))
    with pytest.raises(InputError, match="neither queued_s nor prefill_ms"):
        host_times(read_case(tmp_path / "x"), profile())
    without = case.requests.drop(columns="queue_ms")
    without.to_csv(tmp_path / "x" / "requests.csv", index=False)
    with pytest.raises(InputError, match="queue_ms: not recorded for all requests"):
        host_times(read_case(tmp_path / "x"), profile())


def test_the_command_prints_the_table_and_writes_it(tmp_path: Path) -> None:
    folder = tmp_path / "x"
    made(folder, profile())
    costs = tmp_path / "costs.json"
    costs.write_text(profile().model_dump_json())
    arguments = ["validate", str(folder), "--profile", str(costs), "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(app, [*arguments, "--steps"])
    assert done.exit_code == 0, done.output
    assert "Above the kernels, by kind of step" in done.output
    table = pd.read_csv(tmp_path / "out" / "steps.csv")
    assert set(table["case"]) == {"made-up"}
    assert table["host_ms"].abs().max() < 0.1
    assert CliRunner().invoke(app, arguments).exit_code == 0
    assert not (tmp_path / "out" / "steps.csv").exists()


@recorded
def test_on_the_rtx_pro_6000_only_steps_that_are_launched_by_hand_take_longer() -> None:
    from simkv.proof.validation.cases.calibration import calibrate

    case = read_case(TRUTH / "lss-rtxpro6000-llama3.1-8b")
    found = host_times(case, calibrate(case))
    assert 1e-3 < found.kind("mixed, over the largest CUDA graph").host < 8e-3
    assert abs(found.kind("33 to 128 decodes").host) < 1e-3
