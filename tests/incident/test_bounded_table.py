"""Tests that logs of any length are read in bounded memory, and of the notes on dropped lines."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest

from simkv.incident import bounded_table, vllm_log_reader
from simkv.incident.bounded_table import BoundedArrivals, BoundedTable
from simkv.incident.source_reader import read_source

LINE = (
    "(APIServer pid=1) INFO 01-15 {0:02d}:{1:02d}:{2:02d} [loggers.py:199] Engine 000: "
    "Iteration({3}): 1 context requests, 500 context tokens, 4 generation requests, 4 generation "
    "tokens, iteration elapsed time: 60.00 ms, GPU KV cache usage: 12.5%\n"
    "(APIServer pid=1) INFO 01-15 {0:02d}:{1:02d}:{2:02d} [logger.py:44] Received request "
    "cmpl-{3}: params: SamplingParams(max_tokens=100), lora_request: None.\n"
)


def test_keeps_the_last_rows() -> None:
    table = BoundedTable(4)
    for i in range(11):
        table.append({"t_s": float(i), "name": f"r{i}"})
    found = table.frame()
    assert found is not None
    assert found["t_s"].tolist() == [7, 8, 9, 10]
    assert found["name"].tolist() == ["r7", "r8", "r9", "r10"]
    assert table.note("lines") == ["11 lines found; the last 4 are used"]
    assert BoundedTable(4).frame() is None


def test_thinned_table_keeps_rows_of_the_whole_time() -> None:
    table = BoundedTable(4, thinned=True)
    for i in range(40):
        table.append({"t_s": i})
    found = table.frame()
    assert found is not None
    assert found["t_s"].tolist() == list(range(0, 40, 8))
    assert table.note("steps") == ["40 steps found; every 8th are used"]
    few = BoundedTable(4, thinned=True)
    few.append({"t_s": 1})
    assert few.note("steps") == []


def test_keeps_the_last_arrivals_and_their_aborts() -> None:
    table = BoundedArrivals(2)
    for i in range(5):
        table.came(f"r{i}", float(i), 10, 20)
    table.add_abort("r4", 9.0)
    table.add_abort("r0", 9.0)  # is no longer stored
    found = table.frame()
    assert found is not None
    assert found["request"].tolist() == ["r3", "r4"]
    assert found["gave_up_s"].tolist()[1] == 5.0
    assert table.note() == ["5 requests arrived; the last 2 are used"]


def peak(path: Path, count: int) -> int:
    """Return the peak memory in bytes while a log of ``count`` steps and requests is read."""
    with path.open("w") as file:
        for i in range(count):
            file.write(LINE.format(i // 3600, i // 60 % 60, i % 60, i))
    tracemalloc.start()
    try:
        found = read_source(path)
        assert found.steps is not None
        assert found.arrivals is not None
        assert len(found.arrivals) == 1000
        assert 1000 <= len(found.steps) < 2000
        assert found.steps["t_s"].max() > found.steps["t_s"].min() + 0.9 * count
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_memory_does_not_grow_with_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MAX_LINES", "MAX_STEPS", "MAX_REQUESTS"):
        monkeypatch.setattr(vllm_log_reader, name, 1000)
        assert getattr(bounded_table, name) > 1000
    short, long = (peak(tmp_path / f"{n}.log", n) for n in (4_000, 16_000))
    assert long < 1.6 * short  # 1,000 to 2,000 steps are stored, depending on the thinning
