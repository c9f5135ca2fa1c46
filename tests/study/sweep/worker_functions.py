"""Functions that workers of other processes import, and that die where they are told to."""

from __future__ import annotations

import os
import time
from pathlib import Path

from simkv.study.simulation_job import JobResult, SimulationJob, run_job


def square(number: int) -> int:
    return number * number


def square_once_killed(item: tuple[Path, int]) -> int:
    """The square; the first to come leaves its process id in a file and waits to be killed."""
    note, number = item
    try:
        with note.open("x") as file:
            file.write(str(os.getpid()))
    except FileExistsError:
        return number * number
    time.sleep(60)
    raise AssertionError("nobody killed this worker")


def kill_itself(number: int) -> int:
    os.kill(os.getpid(), 9)
    return number


def kill_noted(note: Path, seconds: float = 60) -> None:
    """Kill -9 the process whose id comes to stand in ``note``."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if note.exists() and (text := note.read_text()):
            os.kill(int(text), 9)
            return
        time.sleep(0.02)


def simulate_once_killed(item: tuple[Path, SimulationJob]) -> JobResult:
    """A run of a sweep; the first worker that takes one waits in it to be killed."""
    note, job = item
    try:
        with note.open("x") as file:
            file.write(str(os.getpid()))
    except FileExistsError:
        return run_job(job)
    time.sleep(60)
    raise AssertionError("nobody killed this worker")
