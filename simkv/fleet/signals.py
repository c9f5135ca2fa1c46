"""What the router knows of the replicas, and how old it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import floor
from typing import Any

import simpy

from simkv.clock import Moment
from simkv.engine import Engine
from simkv.fleet.routers import Router, Signal


@dataclass(slots=True)
class Load:
    """How many wait and run on a replica, and the share of its blocks that is in use."""

    waiting: int = 0
    running: int = 0
    kv_usage: float = 0.0


def load_of(engine: Engine, *, kv: bool) -> Load:
    """The load of a replica now; ``kv`` says whether anybody wants to know of its blocks."""
    usage = 1.0 - engine.free_blocks / engine.scheduler.num_blocks if kv else 0.0
    return Load(engine.num_waiting, engine.num_running, usage)


class Board:
    """The loads that the router reads: as they are, or as they were at the last refresh.

    ``engines`` gives the engines that are there, by replica. Refreshes are at the multiples of
    ``interval`` (s), before all else that happens then. While nothing can change there are none.
    """

    def __init__(
        self,
        env: simpy.Environment,
        engines: Callable[[], Sequence[tuple[int, Engine]]],
        router: Router,
        interval: float,
    ) -> None:
        self.env = env
        self.router = router
        self.interval = interval if router.reads_load or router.reads_kv else 0.0
        self._engines = engines
        self._loads: dict[int, Load] = {}
        self._asleep: simpy.Event | None = None

    def signal(self, replica: int, engine: Engine, in_flight: int) -> Signal:
        """What the router knows of a replica."""
        if not (self.router.reads_load or self.router.reads_kv):
            return Signal(replica, in_flight)
        if self.interval:
            load = self._loads.get(replica) or Load()
        else:
            load = load_of(engine, kv=self.router.reads_kv)
        return Signal(replica, in_flight, load.waiting, load.running, load.kv_usage)

    def sent(self, replica: int) -> None:
        """The router has sent a request to ``replica``."""
        if self.interval and self.router.counts_own_sends:
            self._loads.setdefault(replica, Load()).waiting += 1

    def stir(self) -> None:
        """Something happens again."""
        if self._asleep is not None:
            self._asleep.succeed()
            self._asleep = None

    def run(self) -> Any:
        """Refresh the loads at every multiple of the interval, as a SimPy process."""
        while self.interval:
            kv = self.router.reads_kv
            self._loads = {i: load_of(engine, kv=kv) for i, engine in self._engines()}
            idle = not any(load.waiting or load.running for load in self._loads.values())
            if idle or not self.env._queue:
                self._asleep = self.env.event()
                yield self._asleep
            number = floor(self.env.now / self.interval)
            while number * self.interval <= self.env.now:
                number += 1
            yield Moment(self.env, number * self.interval, Moment.BEFORE)
