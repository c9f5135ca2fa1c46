"""A replica of a fleet for as long as it is there."""

from __future__ import annotations

from dataclasses import dataclass

from simkv.sim.fleet.routers import LoadSignal
from simkv.sim.replica import Replica

#: Of a replica that no router has looked at.
NEVER_SEEN = LoadSignal(-1, 0)


@dataclass(eq=False)
class ReplicaLifetime:
    """A replica from its start to its end, with an engine of its own.

    It is there from ``start`` to ``end`` (s; None is the end of the run), as the ``place``-th of
    the run. ``in_flight`` are the requests that the router has sent there and that have not ended;
    ``signal`` is what it knew when it looked last.
    """

    replica: int
    engine: Replica
    place: int
    start: float = 0.0
    end: float | None = None
    in_flight: int = 0
    leaving: bool = False
    signal: LoadSignal = NEVER_SEEN

    @property
    def name(self) -> str:
        """The replica, and its start if that is not the start of the run."""
        return f"replica {self.replica}" + (f" from {self.start:g} s" if self.start else "")
