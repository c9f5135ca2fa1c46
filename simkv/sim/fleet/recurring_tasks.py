"""Periodic tasks of a fleet, which run as long as other events can occur."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import floor

import simpy

from simkv.sim.clock import ExactTimeout, SimProcess


@dataclass(eq=False, slots=True)
class Tick:
    """Next repetition of a task. It occurs at ``number`` times ``interval`` (s)."""

    interval: float
    number: int
    event: ExactTimeout


class RecurringTasks:
    """Periodic tasks that do not keep a simulation running.

    The tasks pause if no other event is left.
    """

    # The tasks pause if there are no other events.

    def __init__(self, env: simpy.Environment) -> None:
        self.env = env
        self._asleep: list[simpy.Event] = []
        self._ticks: list[Tick] = []

    def notify(self) -> None:
        """Report an external event. Paused tasks then run again."""
        # The tasks run at the next multiple of their interval.
        for event in self._asleep:
            event.succeed()
        self._asleep.clear()
        for tick in self._ticks:
            if (number := self._next_number(tick.interval)) < tick.number:
                tick.number = number
                tick.event = tick.event.move(number * tick.interval)

    def every(self, interval: float, work: Callable[[], float]) -> SimProcess:
        """SimPy process: call ``work`` now and at all multiples of ``interval`` (s).

        ``work`` returns a time (s). Calls before this time have no effect as long as no event
        occurs.
        """
        # A call precedes other events of the same time. Only the last of the calls without effect
        # is simulated.
        while True:
            until, then = work(), self._next_event()
            if then is None:
                rest = self.env.event()
                self._asleep.append(rest)
                yield rest
            number = self._next_number(interval)
            if then is not None and (until := min(until, then)) > self.env.now:
                last = floor(until / interval)
                number = max(number, last if last * interval <= until else last - 1)
            event = ExactTimeout(self.env, number * interval, ExactTimeout.BEFORE)
            tick = Tick(interval, number, event)
            self._ticks.append(tick)
            yield event
            self._ticks.remove(tick)

    def _next_number(self, interval: float) -> int:
        """Return the number of the next multiple of ``interval``."""
        number = floor(self.env.now / interval)
        while number * interval <= self.env.now:
            number += 1
        return number

    def _next_event(self) -> float | None:
        """Return the time (s) of the next event that is not a periodic task, or None."""
        # The smallest k + 1 entries of a heap are among its first 2 ** (k + 1) - 1 entries.
        ticks = [tick.event for tick in self._ticks]
        first = self.env._queue[: 2 ** (len(ticks) + 1) - 1]
        return min((entry[0] for entry in first if entry[3] not in ticks), default=None)
