"""A real Ray cluster of two worker processes on this machine gives what this process gives."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from threading import Thread

import pandas as pd
import pytest

import simkv
from simkv.core.errors import InputError
from simkv.search.bench import working
from simkv.search.jobs import Done, Job
from simkv.search.knobs import parse_axis
from simkv.search.plan.plan import make_plan
from simkv.search.plan.prepare import prepare
from simkv.search.plan.request import PlanRequest
from simkv.search.plan.tables import cliff_table, evaluations, to_json
from simkv.search.pool import _connect, on_ray
from simkv.search.sweep.sweep import finish, sweep_of
from simkv.search.sweep.table import table
from tests.search.sweep.jobs import kill_noted, simulate_once_killed, square, square_once_killed


def test_without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(InputError, match=r"pip install 'simkv\[ray\]'"):
        list(on_ray(square, [1]))


def test_a_wrong_address() -> None:
    with pytest.raises(InputError, match=r"--ray-address 127\.0\.0\.1:1: no Ray cluster"):
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


@pytest.fixture
def killing(tmp_path: Path) -> Iterator[Callable[..., Iterator[Done]]]:
    """Runs on Ray, where the first worker to take one is killed with -9 while it is at it."""
    note = tmp_path / "pid"
    killer = Thread(target=kill_noted, args=(note,))
    killer.start()

    def execute(_: object, jobs: Sequence[Job]) -> Iterator[Done]:
        return on_ray(simulate_once_killed, [(note, job) for job in jobs])

    yield execute
    killer.join()
    assert note.exists(), "nobody was killed"


@pytest.mark.usefixtures("cluster")
def test_a_sweep_whose_worker_is_killed_is_the_same_bit_for_bit(
    small: Path, killing: Callable[..., Iterator[Done]]
) -> None:
    whole = sweep_of(small, [parse_axis("engine.num_gpu_blocks=96..256:32")], repeats=2)
    with working(killing) as bench:
        found = table(whole, finish(whole, bench))
    here = simkv.sweep(small, {"engine.num_gpu_blocks": "96..256:32"}, repeats=2, jobs=1)
    assert found.to_csv() == here.to_csv()


@pytest.mark.usefixtures("cluster")
def test_a_plan_whose_worker_is_killed_is_the_same_bit_for_bit(
    small: Path, killing: Callable[..., Iterator[Done]]
) -> None:
    request = PlanRequest(
        smallest="engine.num_gpu_blocks=80..256:16",
        objectives=["ttft_ms.p99<=400"],
        variants=("plain",),
        repeats=2,
        profile_error=0.1,
    )
    (prepared,) = prepare(small, request)
    with working(killing) as bench:
        there = make_plan(prepared, bench)
    with working(map) as bench:
        here = make_plan(prepare(small, request)[0], bench)
    assert to_json(there) == to_json(here)
    assert evaluations(there).to_csv() == evaluations(here).to_csv()
    assert cliff_table(there).to_csv() == cliff_table(here).to_csv()


@pytest.mark.usefixtures("cluster")
def test_a_plan_by_the_option_is_the_same(small: Path) -> None:
    by = partial(
        simkv.plan,
        small,
        smallest="engine.num_gpu_blocks=80..256:16",
        objectives=["ttft_ms.p99<=400"],
        repeats=1,
    )
    assert by(executor="ray").summary == by(jobs=2).summary
