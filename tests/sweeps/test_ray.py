"""A real Ray cluster of two worker processes on this machine gives what this process gives."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from threading import Thread

import pandas as pd
import pytest

import simkv
from simkv.errors import InputError
from simkv.sweeps.workers import _connect, on_ray
from tests.sweeps.jobs import kill_noted, square, square_once_killed


def test_without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(InputError, match=r"pip install 'simkv\[ray\]'"):
        list(on_ray(square, [1]))


def test_a_wrong_address() -> None:
    with pytest.raises(InputError, match=r"--address 127\.0\.0\.1:1: no Ray cluster"):
        _connect("127.0.0.1:1", None)


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """Two workers, started once for all tests and stopped after them."""
    ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'simkv[ray]'")
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.mark.usefixtures("cluster")
def test_a_killed_worker_changes_nothing(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    killer = Thread(target=kill_noted, args=(note,))
    killer.start()
    found = sorted(on_ray(square_once_killed, [(note, n) for n in range(30)]))
    killer.join()
    assert note.exists()
    assert found == [n * n for n in range(30)]


@pytest.mark.usefixtures("cluster")
def test_a_sweep_is_the_same_bit_for_bit(small: Path) -> None:
    over = {"engine.num_gpu_blocks": [96, 128, 256]}
    sweep = partial(simkv.sweep, small, over, repeats=2)
    pd.testing.assert_frame_equal(sweep(executor="ray"), sweep(jobs=1), check_exact=True)
    assert sweep(executor="ray").to_csv() == sweep(jobs=1).to_csv()
