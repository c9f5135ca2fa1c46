"""Time limit of one call of a custom scheduler.

A call that loops forever is interrupted, so that every run ends. A timer ticks while calls are
made; a call itself costs no system call. Only the main thread can be interrupted, and only where
the operating system has interval timers and nothing else in the process uses the real-time one.
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

#: Seconds of CPU that one call may use.
CPU_SECONDS = 10.0
#: Seconds that one call may take if it waits and uses no CPU.
WALL_SECONDS = 60.0
#: Seconds between two looks at the call.
TICK = 0.5


class CallTimeout(BaseException):
    """A call exceeded its time limit; not an Exception, so that the call does not handle it."""


class _Timer:
    """Interval timer of this process; it stops by itself when no calls are made."""

    def __init__(self) -> None:
        self.inside = False
        self._ticks = 0
        self._cpu = 0.0
        self._ticking = False
        self._before: Any = None
        self._main = threading.main_thread().ident

    def reset(self) -> None:
        """Forget the timer of the parent process, which a forked process does not inherit."""
        self.inside = self._ticking = False
        self._main = threading.main_thread().ident

    @property
    def usable(self) -> bool:
        """Whether a call that starts now can be interrupted."""
        here = threading.get_ident() == self._main
        return here and not self.inside and hasattr(signal, "setitimer")

    def enter(self) -> None:
        """A call starts."""
        self.inside, self._ticks = True, 0
        if not self._ticking and signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0):
            self._before = signal.signal(signal.SIGALRM, self._tick)
            self._ticking = True
            signal.setitimer(signal.ITIMER_REAL, TICK, TICK)

    def stop(self) -> None:
        """Stop ticking, now or at the end of the process, which the next tick would kill."""
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
    """Return what ``call`` returns. Raises CallTimeout if it exceeds the limits."""
    if not _TIMER.usable:
        return call()
    _TIMER.enter()
    try:
        return call()
    finally:
        _TIMER.inside = False


def limits_exceeded() -> str:
    """The limits in words, for a message."""
    return f"used more than {CPU_SECONDS:g} s of CPU, or waited more than {WALL_SECONDS:g} s"
