"""Tests of ``simkv plan``: interrupted and resumed runs, and invalid input."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import pytest

from simkv.cli import main
from simkv.cli.plan import count_runs
from simkv.study.job_runner import JobRunner, ResultFile
from simkv.study.plan.plan_request import PlanRequest, find_option

ASK = [
    *("--smallest", "engine.num_gpu_blocks=64..288:16", "--slo", "ttft_ms.p99<=300"),
    *("--profile-error", "0.1", "--goodput", "ttft:500", "tpot:50"),
]


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str


Plan = Callable[..., Ended]


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Plan:
    """Run the command in this process."""

    def run(*words: object) -> Ended:
        monkeypatch.setattr(sys, "argv", ["simkv", "plan", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            main()
        return Ended(int(ended.value.code or 0), *capsys.readouterr())

    return run


def lines(store: Path) -> int:
    return store.read_bytes().count(b"\n") if store.exists() else 0


def test_killed_and_resumed_plan_gives_same_bytes(small: Path, tmp_path: Path, plan: Plan) -> None:
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    store = killed / "points.jsonl"
    ask = [*ASK, "--repeats", "2"]
    words = [*ask, str(small), "--out", str(killed)]
    for wanted, jobs in ((5, "1"), (15, "2")):
        command = [sys.executable, "-m", "simkv.cli", "plan", *words, "--jobs", jobs]
        process = subprocess.Popen(command)
        until = time.monotonic() + 60
        while lines(store) < wanted and time.monotonic() < until and process.poll() is None:
            time.sleep(0.002)
        process.kill()
        assert process.wait() == -9
        assert lines(store) >= wanted
        assert not (killed / "plan.json").exists()
    resumed = plan(*words, "--jobs", "1")
    assert resumed.code == 0, resumed.err
    assert [line for line in resumed.err.splitlines() if " after " not in line] == []
    before = store.read_bytes()
    again = plan(*words, "--jobs", "1")
    assert again.out == resumed.out
    assert store.read_bytes() == before, "what was done was done again"
    first = plan(*ask, small, "--out", whole, "--jobs", "1")
    assert first.out.replace(str(whole), str(killed)) == resumed.out
    assert lines(store) <= lines(whole / "points.jsonl") + 2
    names = {path.name for path in whole.iterdir()}
    assert names == {path.name for path in killed.iterdir()}
    assert {"plan.json", "evaluations.csv", "cliff.csv", "answer.png", "cliff.png"} <= names
    for name in names - {"points.jsonl"}:
        assert (whole / name).read_bytes() == (killed / name).read_bytes(), name


def test_prints_and_writes_plan(small: Path, tmp_path: Path, plan: Plan) -> None:
    prices = tmp_path / "prices.csv"
    prices.write_text("gpu,price_per_hour\nL4,0.8\n")
    out = tmp_path / "out"
    done = plan(*ASK, "--prices", f"{prices}#l4", small, "--out", out, "--repeats", 2)
    assert done.code == 0, done.err
    (found,) = json.loads((out / "plan.json").read_text())["plans"]
    answer = found["answer"]
    assert f"Answer: engine.num_gpu_blocks = {answer} (" in done.out
    assert "within the profile's error)" in done.out
    assert "0.8 per hour" in done.out
    former = plan(*ASK, "--prices", prices, "--gpu", "l4", small)
    assert former.code == 2
    assert f"--prices {prices}#l4" in former.err
    for name in found["binding"]:
        assert f"limiting objective: {name} (" in done.out
    tried = pd.read_csv(out / "evaluations.csv", keep_default_na=False)
    plain = tried[tried["side"] == ""]
    here = plain[plain["engine.num_gpu_blocks"] == answer]
    assert here["holds"].all()
    assert len(here) == 2
    assert not plain[plain["engine.num_gpu_blocks"] == answer - 16]["holds"].all()
    low, high = found["profile_error"]["range"]
    assert low <= answer <= high
    cliff = pd.read_csv(out / "cliff.csv", keep_default_na=False)
    assert set(cliff["side"]) == {"", "faster", "slower"}


def test_progress_counts_all_runs_of_all_plans() -> None:
    shown: list[tuple[int | None, str | None]] = []

    def advance(done: int | None = None, total: int | None = None, now: str | None = None) -> None:
        assert total is None
        shown.append((done, now))

    store = ResultFile()
    runner = JobRunner(lambda function, jobs: [], store)
    for number in (1, 2):
        store.done |= {f"job {number}": {}}
        count_runs(runner, advance, f"plan {number} of 2, runs")(0, 5)
    assert shown == [(1, "plan 1 of 2, runs"), (2, "plan 2 of 2, runs")]


def test_no_answer_exits_with_1(small: Path, tmp_path: Path, plan: Plan) -> None:
    done = plan(
        *("--smallest", "engine.num_gpu_blocks=64..96:16", "--slo", "e2e_ms.p99<=10"),
        *(small, "--out", tmp_path / "out", "--repeats", 1),
    )
    assert done.code == 1
    assert "No engine.num_gpu_blocks from 64 to 96 meets the objectives" in done.out


@pytest.mark.parametrize(
    ("words", "what"),
    [
        ([], "exactly one of --smallest and --largest"),
        (["--smallest", "timeout=1..3", "--goodput", "tft:5"], "did you mean 'ttft'"),
        (["--smallest", "timeout=1..3", "--slo", "steps<=x"], "expected a number"),
        (["--smallest", "timeout=1..3", "--slo", "steps>=0", "more.yaml"], "expected one scenario"),
        (
            ["--smallest", "timeout=1..3", "--slo", "steps>=0", "--ray-address", "x"],
            "--executor ray",
        ),
        (["--smallest", "timeout=-1..3", "--slo", "steps>=0"], "timeout"),
        (["--smallest", "timeout=1..3", "--slo", "steps>=0", "--survive", "1"], "requires a fleet"),
    ],
)
def test_bad_input_exits_with_2_and_writes_nothing(
    small: Path, tmp_path: Path, plan: Plan, words: list[str], what: str
) -> None:
    done = plan(small, *words, "--out", tmp_path / "out")
    assert done.code == 2, done.err
    assert what in done.err
    assert not (tmp_path / "out").exists()


def test_every_request_field_is_an_option(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    told = plan("--help").out
    flags = {name: find_option(name) for name in PlanRequest.model_fields}
    assert [flag for flag in flags.values() if f"{flag} " not in told] == []
    assert (flags["objectives"], flags["overrides"]) == ("--slo", "--set")
    assert "--no-cliff" in told
