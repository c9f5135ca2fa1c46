"""Functions for worker processes that die on request."""

from __future__ import annotations

import os
import time
from pathlib import Path

from simkv.study.simulation_job import JobResult, SimulationJob, run_job


def square(number: int) -> int:
    return number * number


def square_once_killed(item: tuple[Path, int]) -> int:
    """Return the square; the first worker writes its process id to a file and waits."""
    note, number = item
    try:
        with note.open("x") as file:
            file.write(str(os.getpid()))
    except FileExistsError:
        return number * number
    time.sleep(60)
    raise AssertionError("this worker was not killed")


def kill_itself(number: int) -> int:
    os.kill(os.getpid(), 9)
    return number


def kill_noted(note: Path, seconds: float = 60) -> None:
    """Kill, with signal 9, the process whose id is written to ``note``."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if note.exists() and (text := note.read_text()):
            os.kill(int(text), 9)
            return
        time.sleep(0.02)


def simulate_once_killed(item: tuple[Path, SimulationJob]) -> JobResult:
    """Run a job of a sweep; the first worker that receives a job waits during it to be killed."""
    note, job = item
    try:
        with note.open("x") as file:
            file.write(str(os.getpid()))
    except FileExistsError:
        return run_job(job)
    time.sleep(60)
    raise AssertionError("this worker was not killed")
