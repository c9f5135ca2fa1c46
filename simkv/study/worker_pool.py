"""Executors for jobs: this process, all cores of this machine, or a Ray cluster.

Each executor takes a function of one argument and a list of arguments, and yields the results in
order of completion. If a worker dies, its unfinished work is repeated.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import partial
from multiprocessing import active_children, get_context, parent_process
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

from simkv.core.child_processes import starting_children
from simkv.core.errors import InputError
from simkv.study.simulation_job import RunsFailed

Item = TypeVar("Item")
Product = TypeVar("Product")

#: Maximum number of consecutive worker failures without a result.
MAX_FAILED_ROUNDS = 3


def cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@contextmanager
def open_executor(
    executor: Literal["local", "ray"] = "local",
    jobs: int | None = None,
    address: str | None = None,
) -> Iterator[Callable[..., Iterator[Any]]]:
    """Yield a function with the parameters of ``WorkerPool.run``. All its calls share the same
    workers.

    Raises InputError if Ray is not installed, or if there is no cluster at ``address``.
    """
    if address is not None and executor != "ray":
        raise InputError(f"--ray-address {address}: requires --executor ray")
    if executor == "ray":
        with _session(address, jobs):
            yield partial(run_on_ray, address=address, jobs=jobs)
        return
    with WorkerPool(jobs or cores()) as pool:
        yield pool.run


class WorkerPool:
    """Worker processes on this machine. With one job, no process is started.

    Must be used as a context manager, which ends the processes.
    """

    def __init__(self, jobs: int) -> None:
        self._jobs = jobs
        self._pool: ProcessPoolExecutor | None = None
        self._others: set[BaseProcess] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._close(kill=kind is not None)

    @property
    def started(self) -> bool:
        """Whether processes have been started."""
        return self._pool is not None

    def run(self, function: Callable[[Item], Product], items: Sequence[Item]) -> Iterator[Product]:
        """Yield the results of ``function`` for the items, in order of completion.

        Raises RunsFailed if workers die repeatedly (usually out of memory).
        """
        if self._jobs <= 1:
            yield from map(function, items)
            return
        left = dict(enumerate(items))
        deaths = 0
        while left:
            before = len(left)
            try:
                for number, result in self._pooled(function, left):
                    del left[number]
                    yield result
            except BrokenProcessPool as error:
                deaths = 1 if len(left) < before else deaths + 1
                if deaths == MAX_FAILED_ROUNDS:
                    raise RunsFailed(
                        f"worker processes died {MAX_FAILED_ROUNDS} times in a row, with "
                        f"{len(left)} runs left; they may have run out of memory: use fewer "
                        "--jobs"
                    ) from error

    def _pooled(
        self, function: Callable[[Item], Product], items: dict[int, Item]
    ) -> Iterator[tuple[int, Product]]:
        if self._pool is None:
            _check_script()
            self._others = set(active_children())
            spawn = get_context("spawn")
            with starting_children():
                self._pool = ProcessPoolExecutor(
                    self._jobs, mp_context=spawn, initializer=_end_with_parent
                )
        try:
            with starting_children():  # submit() starts the processes
                futures = {self._pool.submit(function, item): n for n, item in items.items()}
            for future in as_completed(futures):
                yield futures[future], future.result()
        except BaseException:
            self._close(kill=True)
            raise

    def _close(self, kill: bool) -> None:
        if self._pool is None:
            return
        if kill:  # after an interrupt, do not wait for long runs
            for child in set(active_children()) - self._others:
                child.kill()
        self._pool.shutdown(cancel_futures=True)
        self._pool = None


def _check_script() -> None:
    """Check that worker processes can import the main script of this process.

    Raises InputError if the import would start worker processes again.
    """
    main = sys.modules["__main__"]
    script = getattr(main, "__file__", None)
    # in a notebook, or with ``python -m``
    if script is None or getattr(main, "__spec__", None) is not None:
        return
    path = Path(script)
    if path.suffix == ".py" and path.is_file() and "__name__" not in path.read_text("utf-8"):
        raise InputError(
            f"{script}: worker processes import this script; put its code under `if __name__ == "
            '"__main__":`, or run in one process (jobs=1)'
        )


def _end_with_parent() -> None:
    """Ignore Ctrl-C in a worker process, and exit when the parent process ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = parent_process()
    assert parent is not None

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def run_on_ray(
    function: Callable[[Item], Product],
    items: Sequence[Item],
    address: str | None = None,
    jobs: int | None = None,
) -> Iterator[Product]:
    """Run on the Ray cluster at ``address`` (default: RAY_ADDRESS, or a new cluster).

    A new cluster has ``jobs`` workers. All nodes need the same versions of simkv, of the traces and
    of the profiles. Raises InputError if Ray or the cluster is missing. Raises RunsFailed if
    workers die repeatedly.
    """
    with _session(address, jobs) as ray:
        # Ray retries a task if its worker or node is lost.
        remote = ray.remote(function).options(max_retries=MAX_FAILED_ROUNDS, num_cpus=1)
        at_once = 4 * max(int(ray.cluster_resources().get("CPU", 1)), 1)
        waiting = list(reversed(items))
        try:
            running = [remote.remote(waiting.pop()) for _ in range(min(at_once, len(waiting)))]
            while running:
                (first, *_), running = ray.wait(running)
                if waiting:
                    running.append(remote.remote(waiting.pop()))
                yield ray.get(first)
        except ray.exceptions.RayError as error:
            raise RunsFailed(
                f"Ray failed after {MAX_FAILED_ROUNDS} attempts at one run: {error}"
            ) from error


@contextmanager
def _session(address: str | None, jobs: int | None) -> Iterator[Any]:
    """Yield the module ``ray``, connected to a cluster."""
    try:
        import ray
    except ImportError as error:
        raise InputError(
            "--executor ray: Ray is not installed; run pip install 'simkv[ray]'"
        ) from error
    ours = not ray.is_initialized()
    if ours:
        _connect(address or os.environ.get("RAY_ADDRESS") or "local", jobs)
    try:
        yield ray
    finally:
        if ours:
            ray.shutdown()


def _connect(address: str, jobs: int | None) -> None:
    """Connect to a cluster, or start one on this machine.

    Raises InputError if there is no cluster at ``address``.
    """
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    try:
        if colon:  # without this check, Ray would retry for minutes
            socket.create_connection((host, int(port)), timeout=10).close()
        import ray

        ours = {"num_cpus": jobs or cores(), "include_dashboard": False}
        more = ours if address == "local" else {}
        ray.init(address=address, log_to_driver=False, logging_level="error", **more)
    except (OSError, ValueError, RuntimeError) as error:
        raise InputError(
            f"--ray-address {address}: cannot connect to a Ray cluster: {error}"
        ) from error
