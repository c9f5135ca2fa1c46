"""Exact points in SimPy time."""

from __future__ import annotations

from collections.abc import Generator
from heapq import heappush
from typing import Any, ClassVar

import simpy
from simpy.events import EventPriority

SimProcess = Generator[simpy.Event, Any, None]


class ExactTimeout(simpy.Event):
    """Happens at ``time`` (s), after all other events of that time.

    So whoever waits for it sees all that came up to then, and what he sees does not depend on the
    order in which events were queued. SimPy takes delays, and ``now + (time - now)`` is not always
    ``time``; therefore this goes into its queue directly. Of two moments of one time that of the
    lower ``rank`` comes first, and all that follows from it; rank ``BEFORE`` comes before all else.
    """

    #: Rank of what happens before all other events of its time.
    BEFORE: ClassVar[int] = -2

    def __init__(self, env: simpy.Environment, time: float, rank: int = 0) -> None:
        self.env = env  # with the next line what the constructor of events does
        self.callbacks = [_note]
        self.rank = rank
        self._ok = True
        self._value = None
        when = max(time, env.now)
        heappush(env._queue, (when, EventPriority(2 + rank), next(env._eid), self))

    def move(self, time: float) -> ExactTimeout:
        """Let those who wait for this moment wait for another one."""
        other = ExactTimeout(self.env, time, self.rank)
        other.callbacks, self.callbacks = self.callbacks, []
        return other


def _note(moment: simpy.Event) -> None:
    """What happens from now on, at this time, comes after ``moment``."""
    assert isinstance(moment, ExactTimeout)
    moment.env.__dict__["moment"] = (moment.env.now, moment.rank)


def current_rank(env: simpy.Environment) -> int:
    """The rank of the last moment of the present time that has come, or one below all ranks."""
    time, rank = env.__dict__.get("moment", (-1.0, 0))
    return int(rank) if time == env.now else ExactTimeout.BEFORE - 1
