"""Tests of local worker processes: all results arrive, even if workers crash."""

from __future__ import annotations

import sys
from pathlib import Path
from threading import Thread
from types import SimpleNamespace

import pytest

from simkv.core.errors import InputError
from simkv.study.simulation_job import RunsFailed
from simkv.study.worker_pool import WorkerPool
from tests.study.sweep.worker_functions import (
    kill_itself,
    kill_noted,
    square,
    square_once_killed,
)


def test_runs_every_item_once() -> None:
    with WorkerPool(2) as pool:
        assert sorted(pool.run(square, range(20))) == [n * n for n in range(20)]
        assert list(pool.run(square, [])) == []
        assert list(pool.run(square, [3])) == [9]


def test_repeats_work_of_killed_worker(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    killer = Thread(target=kill_noted, args=(note,))
    killer.start()
    with WorkerPool(2) as pool:
        found = sorted(pool.run(square_once_killed, [(note, n) for n in range(8)]))
    killer.join()
    assert found == [n * n for n in range(8)]


def test_stops_after_repeated_worker_deaths() -> None:
    with pytest.raises(RunsFailed, match="2 runs left"), WorkerPool(2) as pool:
        list(pool.run(kill_itself, [1, 2]))


def test_rejects_script_without_main_guard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "mine.py"
    script.write_text("simkv.sweep('a.yaml')\n", encoding="utf-8")
    monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace(__file__=str(script)))
    with pytest.raises(InputError, match=r"mine\.py: .*__name__"), WorkerPool(2) as pool:
        list(pool.run(abs, [1, 2]))
    with WorkerPool(1) as pool:
        assert list(pool.run(abs, [-1, 2])) == [1, 2]
