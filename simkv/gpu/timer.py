"""What time it is: by the wall, or by the work of this thread.

    use("cpu")
    begin = ticks()

A machine that others use takes a thread off its core in the middle of a step; the CPU time of the
thread leaves that out. It knows no waiting, so whoever would wait jumps (``executor.WallClock``).
Steps on a GPU are waited for: there only the wall will do.
"""

from __future__ import annotations

from time import perf_counter, thread_time
from typing import Literal

ClockName = Literal["wall", "cpu"]
_CLOCKS = {"wall": perf_counter, "cpu": thread_time}
_chosen: list[ClockName] = ["wall"]


def use_clock(clock: ClockName) -> None:
    """Take this clock from now on, in the whole process."""
    _chosen[0] = clock


def current_clock() -> ClockName:
    """The one that is in use."""
    return _chosen[0]


def read_timer() -> float:
    """Seconds since some moment."""
    return _CLOCKS[_chosen[0]]()
