"""What a fleet does at the multiples of an interval, for as long as anything can happen."""

from __future__ import annotations

from collections.abc import Callable
from math import floor

import simpy

from simkv.sim.clock import ExactTimeout, SimProcess


class RecurringTasks:
    """Repeated work that keeps no world alive: it rests when nothing else is left to come."""

    def __init__(self, env: simpy.Environment) -> None:
        self.env = env
        self._asleep: list[simpy.Event] = []
        self._pending = 0

    def notify(self) -> None:
        """Something has come from outside: who rests goes on at the next multiple."""
        for event in self._asleep:
            event.succeed()
        self._asleep.clear()

    def every(self, interval: float, work: Callable[[], bool]) -> SimProcess:
        """Do ``work`` now and at all multiples of ``interval`` (s), before all else of that time.

        It returns whether it would do nothing new until something comes from outside; then it is
        not done again before that.
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
