"""Time limit of one call of a custom scheduler.

A call that loops forever is interrupted, so that every run ends. An interval timer checks the
duration of calls. Only calls on the main thread can be interrupted.
"""

from __future__ import annotations

import atexit
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

Answer = TypeVar("Answer")

#: CPU time limit of one call (s).
CPU_SECONDS = 10.0
#: Wall-clock time limit of one call that waits without using CPU (s).
WALL_SECONDS = 60.0
#: Interval between two checks of the call (s).
TICK = 0.5


class CallTimeout(BaseException):
    """Raised if a call exceeds its time limit.

    Code that catches Exception does not catch it.
    """


class _Timer:
    """Interval timer of this process. It stops by itself if no call is in progress."""

    def __init__(self) -> None:
        self.inside = False
        self._ticks = 0
        self._cpu = 0.0
        self._ticking = False
        self._before: Any = None
        self._main = threading.main_thread().ident

    def reset(self) -> None:
        """Reset the state in a child process after a fork."""
        self.inside = self._ticking = False
        self._main = threading.main_thread().ident

    @property
    def usable(self) -> bool:
        """Whether a call that starts now could be interrupted."""
        here = threading.get_ident() == self._main
        return here and not self.inside and hasattr(signal, "setitimer")

    def enter(self) -> None:
        """Start timing a call."""
        self.inside, self._ticks = True, 0
        if not self._ticking and signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0):
            self._before = signal.signal(signal.SIGALRM, self._tick)
            self._ticking = True
            signal.setitimer(signal.ITIMER_REAL, TICK, TICK)

    def stop(self) -> None:
        """Stop the timer. A timer that keeps running would kill the process at exit."""
        if self._ticking:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            signal.signal(signal.SIGALRM, self._before)
            self._ticking = False

    def _tick(self, *_: object) -> None:
        if not self.inside:
            self.stop()
            return
        self._ticks += 1
        if self._ticks == 1:
            self._cpu = time.thread_time()
        elif time.thread_time() - self._cpu > CPU_SECONDS or self._ticks * TICK > WALL_SECONDS:
            raise CallTimeout


_TIMER = _Timer()
atexit.register(_TIMER.stop)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_TIMER.reset)


def call_in_time(call: Callable[[], Answer]) -> Answer:
    """Call ``call`` and return its result. Raises CallTimeout if the call exceeds its time
    limit.
    """
    if not _TIMER.usable:
        return call()
    _TIMER.enter()
    try:
        return call()
    finally:
        _TIMER.inside = False


def limits_exceeded() -> str:
    """Return an error text with the limits of CPU time and wall-clock time."""
    return f"used more than {CPU_SECONDS:g} s of CPU time or {WALL_SECONDS:g} s of wall-clock time"
