"""Tests of ``simkv sweep`` in separate processes, killed and restarted."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pandas as pd
import pytest

from simkv.cli import main

OVER = ["--over", "engine.num_gpu_blocks=80..200:10", "--repeats", "3"]
RUNS = 13 * 2 * 3


def command(small: Path, out: Path, *more: str) -> list[str]:
    return [sys.executable, "-m", "simkv.cli", "sweep", str(small), "--out", str(out), *more]


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str


Sweep = Callable[..., Ended]


@pytest.fixture
def sweep(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Sweep:
    """Run the command in this process."""

    def run(small: Path, out: Path, *more: str) -> Ended:
        monkeypatch.setattr(sys, "argv", ["simkv", "sweep", str(small), "--out", str(out), *more])
        with pytest.raises(SystemExit) as ended:
            main()
        return Ended(int(ended.value.code or 0), *capsys.readouterr())

    return run


def lines(store: Path) -> int:
    return store.read_bytes().count(b"\n") if store.exists() else 0


def children(pid: int) -> list[int]:
    listed = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in listed.read_text().split()] if listed.exists() else []


def test_killed_and_resumed_sweep_gives_same_bytes(
    small: Path, tmp_path: Path, sweep: Sweep
) -> None:
    killed, store = tmp_path / "killed", tmp_path / "killed" / "points.jsonl"
    workers: list[int] = []
    for wanted, jobs in ((5, "2"), (20, "1")):
        process = subprocess.Popen(command(small, killed, *OVER, "--jobs", jobs))
        until = time.monotonic() + 60
        while lines(store) < wanted and time.monotonic() < until and process.poll() is None:
            time.sleep(0.002)
        workers += children(process.pid)
        process.kill()
        assert process.wait() == -9
        assert wanted <= lines(store) < RUNS
        with store.open("ab") as file:
            file.write(b'{"digest": "torn')
    done = lines(store)
    last = sweep(small, killed, *OVER, "--jobs", "2")
    assert last.code == 0, last.err
    assert last.err == ""
    # All complete lines still count: only the other jobs are run again.
    assert lines(store) <= RUNS + 2
    assert done < RUNS
    whole = sweep(small, tmp_path / "whole", *OVER, "--jobs", "1")
    assert whole.code == 0, whole.err
    names = {path.name for path in (tmp_path / "whole").iterdir()}
    assert names == {path.name for path in killed.iterdir()}
    for name in names - {"points.jsonl"}:
        assert (killed / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name
    assert len(pd.read_csv(killed / "table.csv")) == RUNS
    # The workers of a killed sweep end, too.
    until = time.monotonic() + 20
    while any(Path(f"/proc/{pid}").exists() for pid in workers) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers)


def test_writes_table_plots_and_front(small: Path, tmp_path: Path, sweep: Sweep) -> None:
    out = tmp_path / "out"
    done = sweep(
        small,
        out,
        *("--over", "engine.num_gpu_blocks=96,128", "--jobs", "1"),
        *("--plot", "e2e_ms.p99:engine.num_gpu_blocks"),
        *("--pareto", "output_throughput:max,ttft_ms.p99:min"),
    )
    assert done.code == 0, done.err
    pictures = {path.name for path in out.glob("*.png")}
    assert pictures == {
        "e2e_ms.p99-by-engine.num_gpu_blocks.png",
        "pareto-output_throughput-ttft_ms.p99.png",
    }
    assert "Pareto front by output_throughput:max, ttft_ms.p99:min" in done.out
    table = pd.read_csv(out / "table.csv")
    assert table["variant"].tolist() == ["plain", "cold"] * 2
    if find_spec("pyarrow"):
        parquet = pd.read_parquet(out / "table.parquet")
        assert parquet["e2e_ms.mean"].tolist() == table["e2e_ms.mean"].tolist()
        assert list(parquet) == list(table)
    else:
        assert "pip install 'simkv[parquet]'" in done.out


@pytest.mark.parametrize(
    ("more", "what"),
    [
        ([], "--over: expected a setting"),
        (["--over", "engine.num_gpu_blocks=0,-5"], "num_gpu_blocks=-5"),
        (["--over", "timeout=1", "--plot", "steps:x"], "not a setting"),
        (["--over", "timeout=1", "--ray-address", "auto"], "requires --executor ray"),
        (["--over", "timeout=1", "--sample", "x"], "random:N or lhs:N"),
    ],
)
def test_bad_input_exits_with_2_and_writes_nothing(
    small: Path, tmp_path: Path, sweep: Sweep, more: list[str], what: str
) -> None:
    done = sweep(small, tmp_path / "out", *more)
    assert done.code == 2, done.err
    assert what in done.err
    assert not (tmp_path / "out").exists()


def test_rejects_foreign_output_folder(small: Path, tmp_path: Path, sweep: Sweep) -> None:
    done = sweep(small, tmp_path, "--over", "timeout=1")
    assert done.code == 2
    assert "contains other files and no sweep" in done.err


MIXED = """name: mix
workload: {requests: [{arrival: 0, prompt_tokens: 1000, output_tokens: 20}]}
engine: {name: vllm, num_gpu_blocks: auto}
hardware: {gpu: H100-SXM, model: llama-3.1-8b}
"""


def test_rows_and_front_state_the_basis_of_their_step_times(
    tmp_path: Path, sweep: Sweep, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows with different step times are marked at any width; if all are equal, their basis is
    named once.
    """
    monkeypatch.setenv("COLUMNS", "60")
    file = tmp_path / "mix.yaml"
    file.write_text(MIXED)
    goals = "output_throughput:max,ttft_ms.p99:min,e2e_ms.p99:max"
    options = ("--over", "hardware.gpu=H100-SXM,MI300X", "--jobs", "1", "--pareto", goals)
    out = sweep(file, tmp_path / "two", *options).out
    table, front = out.split("Pareto front")
    for part in (table, front):
        assert "composed" in part
        assert "data sheet" in part
    assert "Step times have different bases (composed, data sheet)" in table
    drawn = [line for line in table.splitlines() if line.startswith("  ")]
    assert max(map(len, drawn)) <= 60
    one = ("--over", "hardware.gpu=H100-SXM", "--jobs", "1")
    assert "\nStep times: composed ±" in sweep(file, tmp_path / "one", *one).out
