"""Load of replicas as seen by a router, which may be out of date."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

from simkv.sim.fleet.cache_views import build_cache_view
from simkv.sim.fleet.replica_lifetime import ReplicaLifetime
from simkv.sim.fleet.routers import LoadSignal, Router
from simkv.sim.replica_base import Replica


@dataclass(slots=True)
class Occupancy:
    """Load of a replica.

    The fields are the numbers of waiting and running requests, and the fraction of used blocks.
    """

    waiting: int = 0
    running: int = 0
    kv_usage: float = 0.0


def kv_usage(engine: Replica) -> float:
    """Return the fraction of a replica's blocks that are in use."""
    return 1.0 - engine.free_blocks / engine.scheduler.num_blocks


class LoadBoard:
    """Loads that a router reads.

    They are the current loads or, if ``interval`` is not 0, the loads at the last ``refresh``.
    ``interval`` is the time between refreshes in seconds. The function ``engines`` returns pairs of
    replica number and engine.
    """

    # If ``interval`` is not 0, the caller must call ``refresh`` at all multiples of ``interval``.

    def __init__(
        self,
        engines: Callable[[], Sequence[tuple[int, Replica]]],
        router: Router,
        interval: float,
    ) -> None:
        self.router = router
        self.interval = interval if router.reads_load or router.reads_kv else 0.0
        self._reads_kv = router.reads_kv
        self._reads = router.reads_load or router.reads_kv
        self._engines = engines
        self._loads: dict[int, Occupancy] = {}

    def signals(self, lifetimes: Sequence[ReplicaLifetime]) -> list[LoadSignal]:
        """Return the loads of replicas as the router sees them."""
        if knowledge := self.router.knowledge:
            for lifetime in lifetimes:
                # The first call precedes the first request of a replica, so no event is missed.
                if lifetime.cache is None:
                    lifetime.cache = build_cache_view(lifetime.engine, knowledge)
        return self._signals(lifetimes)

    def _signals(self, lifetimes: Sequence[ReplicaLifetime]) -> list[LoadSignal]:
        if self.interval or self._reads_kv:
            return [self._signal(lifetime) for lifetime in lifetimes]
        for lifetime in lifetimes:
            if lifetime.engine.changed:
                lifetime.engine.changed = False
                lifetime.signal = self._signal(lifetime)
        return [lifetime.signal for lifetime in lifetimes]

    def _signal(self, lifetime: ReplicaLifetime) -> LoadSignal:
        replica, engine, in_flight = lifetime.replica, lifetime.engine, lifetime.in_flight
        cache = lifetime.cache
        if self.interval:
            load = self._loads.get(replica) or Occupancy()
            return LoadSignal(replica, in_flight, load.waiting, load.running, load.kv_usage, cache)
        if not self._reads:
            return LoadSignal(replica, in_flight, cache=cache)
        usage = kv_usage(engine) if self._reads_kv else 0.0
        waiting, running = engine.num_waiting, engine.num_running
        return LoadSignal(replica, in_flight, waiting, running, usage, cache)

    def record_sent(self, replica: int) -> None:
        """Record that the router has sent a request to ``replica``."""
        if self.interval and self.router.counts_own_sends:
            self._loads.setdefault(replica, Occupancy()).waiting += 1

    def refresh(self) -> float:
        """Read the load of all replicas.

        Returns a time (s). Before this time, the loads change only if an event occurs.
        """
        # The time is 0 if the router reads the fraction of blocks in use, because this fraction
        # also changes without an event (during a leap over several steps).
        self._loads = {
            i: Occupancy(e.num_waiting, e.num_running, kv_usage(e) if self._reads_kv else 0.0)
            for i, e in self._engines()
        }
        return 0.0 if self._reads_kv and any(x.running for x in self._loads.values()) else inf
