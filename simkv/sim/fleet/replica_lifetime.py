"""Lifetime of a replica in a fleet."""

from __future__ import annotations

from dataclasses import dataclass

from simkv.sim.fleet.cache_views import CacheView
from simkv.sim.fleet.routers import LoadSignal
from simkv.sim.replica_base import Replica

#: Load of a replica that no router has read yet.
NEVER_SEEN = LoadSignal(-1, 0)


@dataclass(eq=False)
class ReplicaLifetime:
    """Lifetime of a replica from ``start`` to ``end`` (s), with its own engine.

    - ``end``: None if the replica lasts to the end of the run.
    - ``index``: number of the lifetime among all lifetimes of the run.
    - ``in_flight``: number of unfinished requests that the router sent to the replica.
    - ``signal``: load of the replica when the router last read it.
    - ``cache``: prefix cache as the router sees it; None if the router does not read it.
    """

    replica: int
    engine: Replica
    index: int
    start: float = 0.0
    end: float | None = None
    in_flight: int = 0
    leaving: bool = False
    signal: LoadSignal = NEVER_SEEN
    cache: CacheView | None = None

    @property
    def name(self) -> str:
        """Name of the replica.

        If the replica starts later than the run, the name contains the start time.
        """
        return f"replica {self.replica}" + (f" from {self.start:g} s" if self.start else "")
