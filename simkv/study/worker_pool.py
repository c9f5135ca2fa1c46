"""Where jobs run: in this process, on all cores of this machine, or on a Ray cluster.

Each function takes a function of one argument and its arguments, and yields what it returns in the
order in which that is done. A worker that dies takes nothing with it: what it did is done again.
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

from simkv.core.child_import_path import safe_module_path
from simkv.core.errors import InputError
from simkv.study.simulation_job import RunsFailed

Item = TypeVar("Item")
Product = TypeVar("Product")

#: So many times in a row workers may die before anything gets done.
MAX_FAILED_ROUNDS = 3


def cores() -> int:
    """How many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@contextmanager
def open_executor(
    executor: Literal["local", "ray"] = "local",
    jobs: int | None = None,
    address: str | None = None,
) -> Iterator[Callable[..., Iterator[Any]]]:
    """A function as ``WorkerPool.run`` or ``run_on_ray``, whose workers stay from one call to the
    next.

    Raises InputError if there is no Ray, or no cluster at ``address``.
    """
    if address is not None and executor != "ray":
        raise InputError(f"--ray-address {address}: is for --executor ray")
    if executor == "ray":
        with _session(address, jobs):
            yield partial(run_on_ray, address=address, jobs=jobs)
        return
    with WorkerPool(jobs or cores()) as pool:
        yield pool.run


class WorkerPool:
    """Processes of this machine, started when they are first needed; one job at a time needs none.

    Use it as a context manager, so that its processes end with it.
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
        """Whether there are processes already."""
        return self._pool is not None

    def run(self, function: Callable[[Item], Product], items: Sequence[Item]) -> Iterator[Product]:
        """What the function makes of the items, as it comes.

        Raises RunsFailed if workers die (for want of memory, as a rule) and nothing gets done.
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
                        f"{len(left)} runs "
                        "left; fewer at a time (--jobs) need less memory"
                    ) from error

    def _pooled(
        self, function: Callable[[Item], Product], items: dict[int, Item]
    ) -> Iterator[tuple[int, Product]]:
        if self._pool is None:
            _check_script()
            self._others = set(active_children())
            spawn = get_context("spawn")
            with safe_module_path():
                self._pool = ProcessPoolExecutor(
                    self._jobs, mp_context=spawn, initializer=_end_with_parent
                )
        try:
            with safe_module_path():  # submit() starts the processes
                futures = {self._pool.submit(function, item): n for n, item in items.items()}
            for future in as_completed(futures):
                yield futures[future], future.result()
        except BaseException:
            self._close(kill=True)
            raise

    def _close(self, kill: bool) -> None:
        if self._pool is None:
            return
        if kill:  # an interrupt does not wait for runs that take minutes
            for child in set(active_children()) - self._others:
                child.kill()
        self._pool.shutdown(cancel_futures=True)
        self._pool = None


def _check_script() -> None:
    """A process that is started runs the script again, which must not start processes then.

    Raises InputError if it would.
    """
    main = sys.modules["__main__"]
    script = getattr(main, "__file__", None)
    if script is None or getattr(main, "__spec__", None) is not None:  # a notebook; python -m
        return
    path = Path(script)
    if path.suffix == ".py" and path.is_file() and "__name__" not in path.read_text("utf-8"):
        raise InputError(
            f"{script}: runs on several cores start this script again; put what it does under "
            'if __name__ == "__main__":, or use one core (jobs=1)'
        )


def _end_with_parent() -> None:
    """In a worker: leave Ctrl-C to the parent, and do not outlive it, however it ends."""
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
    """Run on the Ray cluster at ``address`` (or RAY_ADDRESS), else on one of this machine.

    The latter has ``jobs`` workers. Every node needs the same simkv, and scenarios' traces and
    profiles at the same place. Raises InputError if there is no Ray or no such cluster, RunsFailed
    if workers die again and again at the same work.
    """
    with _session(address, jobs) as ray:
        # Ray itself runs a task again whose worker or node is lost.
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
                f"Ray gave up, after {MAX_FAILED_ROUNDS} tries at one run: {error}"
            ) from error


@contextmanager
def _session(address: str | None, jobs: int | None) -> Iterator[Any]:
    """The module ``ray``, connected to a cluster; disconnected afterwards unless it was before."""
    try:
        import ray
    except ImportError as error:
        raise InputError("--executor ray: Ray is missing; pip install 'simkv[ray]'") from error
    ours = not ray.is_initialized()
    if ours:
        _connect(address or os.environ.get("RAY_ADDRESS") or "local", jobs)
    try:
        yield ray
    finally:
        if ours:
            ray.shutdown()


def _connect(address: str, jobs: int | None) -> None:
    """Connect to a cluster, or start one here. Raises InputError if there is none."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    try:
        if colon:  # Ray itself would try for minutes
            socket.create_connection((host, int(port)), timeout=10).close()
        import ray

        ours = {"num_cpus": jobs or cores(), "include_dashboard": False}
        more = ours if address == "local" else {}
        ray.init(address=address, log_to_driver=False, logging_level="error", **more)
    except (OSError, ValueError, RuntimeError) as error:
        raise InputError(f"--ray-address {address}: no Ray cluster there: {error}") from error
