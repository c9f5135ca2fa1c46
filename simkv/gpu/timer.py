"""Read the time: the wall clock, or the CPU time of this thread.

    use_clock("cpu")
    begin = read_timer()

On a shared machine, a thread may lose its core in the middle of a step. CPU time excludes this
interruption. Steps on a GPU need the wall clock, because the thread waits for them.
"""

from __future__ import annotations

from time import perf_counter, thread_time
from typing import Literal

ClockName = Literal["wall", "cpu"]
_CLOCKS = {"wall": perf_counter, "cpu": thread_time}
_chosen: list[ClockName] = ["wall"]


def use_clock(clock: ClockName) -> None:
    """Set the clock for the whole process."""
    _chosen[0] = clock


def current_clock() -> ClockName:
    """Return the name of the current clock."""
    return _chosen[0]


def read_timer() -> float:
    """Return seconds since an arbitrary time."""
    return _CLOCKS[_chosen[0]]()
