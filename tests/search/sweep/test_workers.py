"""Processes of this machine: all that is asked for comes back, whoever dies."""

from __future__ import annotations

from pathlib import Path
from threading import Thread

import pytest

from simkv.search.workers import WorkersDied, local
from tests.search.sweep.jobs import kill_itself, kill_noted, square, square_once_killed


def test_every_item_once() -> None:
    assert sorted(local(square, range(20), jobs=2)) == [n * n for n in range(20)]
    assert list(local(square, [], jobs=2)) == []
    assert list(local(square, [3], jobs=2)) == [9]


def test_what_a_killed_worker_did_is_done_again(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    killer = Thread(target=kill_noted, args=(note,))
    killer.start()
    found = sorted(local(square_once_killed, [(note, n) for n in range(8)], jobs=2))
    killer.join()
    assert found == [n * n for n in range(8)]


def test_workers_that_always_die() -> None:
    with pytest.raises(WorkersDied, match="2 runs left"):
        list(local(kill_itself, [1, 2], jobs=2))
