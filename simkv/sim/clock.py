# mypyc: compile
"""Events at exact points of SimPy time."""

from __future__ import annotations

from collections.abc import Generator
from heapq import heappush
from typing import Any, ClassVar

import simpy
from simpy.events import EventPriority

SimProcess = Generator[simpy.Event, Any, None]


class ExactTimeout(simpy.Event):
    """Event at exactly ``time`` (s), after all other events at that time.

    If several ``ExactTimeout`` events have the same time, the one with the lowest ``rank`` comes
    first. With the rank ``BEFORE``, the event comes before all other events at that time instead.
    """

    # Processes that wait for this event see the effects of all other events up to ``time``,
    # whatever the order in which the events were queued. SimPy accepts only delays. The sum of a
    # delay and the present time may differ from ``time`` by a rounding error, so this class pushes
    # the event directly to SimPy's queue. All consequences of an event come before the event with
    # the next rank.

    #: Rank of an event that precedes all other events of its time.
    BEFORE: ClassVar[int] = -2

    def __init__(self, env: simpy.Environment, time: float, rank: int = 0) -> None:
        self.env = env  # this and the next line replace the constructor of SimPy events
        self.callbacks = [_note]
        self.rank = rank
        self._ok = True
        self._value = None
        when = max(time, env.now)
        heappush(env._queue, (when, EventPriority(2 + rank), next(env._eid), self))

    def move(self, time: float) -> ExactTimeout:
        """Replace this event by a new event at ``time`` (s) and return the new one.

        All waiting processes then wait for the new event.
        """
        other = ExactTimeout(self.env, time, self.rank)
        other.callbacks, self.callbacks = self.callbacks, []
        return other


def _note(moment: simpy.Event) -> None:
    """Record ``moment`` as the latest ``ExactTimeout`` at the present time."""
    assert isinstance(moment, ExactTimeout)
    moment.env.__dict__["moment"] = (moment.env.now, moment.rank)


def current_rank(env: simpy.Environment) -> int:
    """Return the rank of the last ``ExactTimeout`` at the present time."""
    # Without such an event, the result is below all ranks.
    time, rank = env.__dict__.get("moment", (-1.0, 0))
    return int(rank) if time == env.now else ExactTimeout.BEFORE - 1
