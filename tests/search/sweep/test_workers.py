"""Processes of this machine: all that is asked for comes back, whoever dies."""

from __future__ import annotations

from pathlib import Path
from threading import Thread

import pytest

from simkv.search.jobs import RunsFailed
from simkv.search.pool import Pool
from tests.search.sweep.jobs import kill_itself, kill_noted, square, square_once_killed


def test_every_item_once() -> None:
    with Pool(2) as pool:
        assert sorted(pool.run(square, range(20))) == [n * n for n in range(20)]
        assert list(pool.run(square, [])) == []
        assert list(pool.run(square, [3])) == [9]


def test_what_a_killed_worker_did_is_done_again(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    killer = Thread(target=kill_noted, args=(note,))
    killer.start()
    with Pool(2) as pool:
        found = sorted(pool.run(square_once_killed, [(note, n) for n in range(8)]))
    killer.join()
    assert found == [n * n for n in range(8)]


def test_workers_that_always_die() -> None:
    with pytest.raises(RunsFailed, match="2 runs left"), Pool(2) as pool:
        list(pool.run(kill_itself, [1, 2]))
