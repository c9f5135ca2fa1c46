"""Periodic tasks of a fleet, which run as long as any other event can occur."""

from __future__ import annotations

from collections.abc import Callable
from math import floor

import simpy

from simkv.sim.clock import ExactTimeout, SimProcess


class RecurringTasks:
    """Periodic tasks that do not keep a simulation running: without other events they pause."""

    def __init__(self, env: simpy.Environment) -> None:
        self.env = env
        self._asleep: list[simpy.Event] = []
        self._pending = 0

    def notify(self) -> None:
        """Report an external event: paused tasks resume at the next multiple of their interval."""
        for event in self._asleep:
            event.succeed()
        self._asleep.clear()

    def every(self, interval: float, work: Callable[[], bool]) -> SimProcess:
        """SimPy process: do ``work`` now and, before other events, at all multiples of ``interval``
        (s).

        If ``work`` returns True, repeating it has no effect, and the task pauses until an external
        event.
        """
        while True:
            if work() or len(self.env._queue) <= self._pending:
                rest = self.env.event()
                self._asleep.append(rest)
                yield rest
            number = floor(self.env.now / interval)
            while number * interval <= self.env.now:
                number += 1
            self._pending += 1
            yield ExactTimeout(self.env, number * interval, ExactTimeout.BEFORE)
            self._pending -= 1
