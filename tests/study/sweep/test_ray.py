"""Tests that a Ray cluster of two worker processes gives the same results as this process."""

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
from simkv.study.job_runner import open_runner
from simkv.study.plan.capacity_plan import make_plan
from simkv.study.plan.plan_preparation import prepare
from simkv.study.plan.plan_request import PlanRequest
from simkv.study.plan.plan_tables import cliff_table, evaluations, to_json
from simkv.study.simulation_job import JobResult, SimulationJob
from simkv.study.sweep.sweep import build_sweep, run_sweep
from simkv.study.sweep.sweep_table import build_sweep_table
from simkv.study.sweep_axes import parse_axis
from simkv.study.worker_pool import _connect, run_on_ray
from tests.study.sweep.worker_functions import (
    kill_noted,
    simulate_once_killed,
    square,
    square_once_killed,
)


def test_reports_missing_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(InputError, match=r"pip install 'simkv\[ray\]'"):
        list(run_on_ray(square, [1]))


def test_rejects_wrong_address() -> None:
    with pytest.raises(
        InputError, match=r"--ray-address 127\.0\.0\.1:1: cannot connect to a Ray cluster"
    ):
        _connect("127.0.0.1:1", None)


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """Start two workers once for all tests and stop them at the end."""
    ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'simkv[ray]'")
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.mark.usefixtures("cluster")
def test_killed_worker_changes_nothing(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    killer = Thread(target=kill_noted, args=(note,))
    killer.start()
    found = sorted(run_on_ray(square_once_killed, [(note, n) for n in range(30)]))
    killer.join()
    assert note.exists()
    assert found == [n * n for n in range(30)]


@pytest.mark.usefixtures("cluster")
def test_sweep_is_identical(small: Path) -> None:
    over = {"engine.num_gpu_blocks": [96, 128, 256]}
    sweep = partial(simkv.sweep, small, over, repeats=2)
    pd.testing.assert_frame_equal(sweep(executor="ray"), sweep(jobs=1), check_exact=True)
    assert sweep(executor="ray").to_csv() == sweep(jobs=1).to_csv()


@pytest.fixture
def killing(tmp_path: Path) -> Iterator[Callable[..., Iterator[JobResult]]]:
    """Return a function that runs jobs on Ray and kills the first worker with signal 9 during its
    job.
    """
    note = tmp_path / "pid"
    killer = Thread(target=kill_noted, args=(note,))
    killer.start()

    def execute(_: object, jobs: Sequence[SimulationJob]) -> Iterator[JobResult]:
        return run_on_ray(simulate_once_killed, [(note, job) for job in jobs])

    yield execute
    killer.join()
    assert note.exists(), "nobody was killed"


@pytest.mark.usefixtures("cluster")
def test_sweep_with_killed_worker_is_identical(
    small: Path, killing: Callable[..., Iterator[JobResult]]
) -> None:
    whole = build_sweep(small, [parse_axis("engine.num_gpu_blocks=96..256:32")], repeats=2)
    with open_runner(killing) as runner:
        found = build_sweep_table(whole, run_sweep(whole, runner))
    here = simkv.sweep(small, {"engine.num_gpu_blocks": "96..256:32"}, repeats=2, jobs=1)
    assert found.to_csv() == here.to_csv()


@pytest.mark.usefixtures("cluster")
def test_plan_with_killed_worker_is_identical(
    small: Path, killing: Callable[..., Iterator[JobResult]]
) -> None:
    request = PlanRequest(
        smallest="engine.num_gpu_blocks=80..256:16",
        objectives=["ttft_ms.p99<=400"],
        variants=("plain",),
        repeats=2,
        profile_error=0.1,
    )
    (prepared,) = prepare(small, request)
    with open_runner(killing) as runner:
        there = make_plan(prepared, runner)
    with open_runner(map) as runner:
        here = make_plan(prepare(small, request)[0], runner)
    assert to_json(there) == to_json(here)
    assert evaluations(there).to_csv() == evaluations(here).to_csv()
    assert cliff_table(there).to_csv() == cliff_table(here).to_csv()


@pytest.mark.usefixtures("cluster")
def test_plan_option_gives_same_result(small: Path) -> None:
    by = partial(
        simkv.plan,
        small,
        smallest="engine.num_gpu_blocks=80..256:16",
        objectives=["ttft_ms.p99<=400"],
        repeats=1,
    )
    assert by(executor="ray").summary == by(jobs=2).summary
