"""A fleet: replicas behind a router. To the clients it is what one engine is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import simpy

from simkv.engine import Engine, Process, cut_off, give_outcomes
from simkv.fleet.lockstep import LockStep
from simkv.fleet.merge import whole
from simkv.fleet.routers import Router
from simkv.fleet.signals import Board
from simkv.record import Life, Record
from simkv.request import Request

#: Makes the engine of a replica, given the rank of its moments.
Maker = Callable[[simpy.Environment, int], Engine]
#: Moments of one time go by replica; an engine may use two ranks.
RANKS = 2


@dataclass(eq=False)
class Stint:
    """A replica from its start to its end, with an engine of its own.

    It is there from ``start`` to ``end`` (s; None is the end of the run). ``in_flight`` are the
    requests that the router has sent there and that have not ended.
    """

    replica: int
    engine: Engine
    start: float = 0.0
    end: float | None = None
    in_flight: int = 0


def name_of(stint: Stint) -> str:
    """A stint by its replica, and by its start if that is not the start of the run."""
    return f"replica {stint.replica}" + (f" from {stint.start:g} s" if stint.start else "")


class Fleet:
    """Replicas in one world; ``submit`` and the rest as for an ``Engine``.

    ``makers`` make the engines, one per replica; with ``lockstep`` their steps are taken together.
    ``resolved`` is called whenever a request has ended, and ``ended`` is told how. ``in_system_s``
    adds up, over time, how many requests are in the fleet: over the length of the run it is their
    mean number.
    """

    def __init__(
        self,
        env: simpy.Environment,
        makers: Sequence[Maker],
        router: Router,
        refresh_interval: float = 0.0,
        resolved: Callable[[], None] | None = None,
        *,
        lockstep: bool = False,
    ) -> None:
        self.env = env
        self.router = router
        self.lockstep = lockstep
        self.ended: Callable[[Life], None] | None = None
        self.stints: list[Stint] = []
        self.in_system_s = 0.0
        self._resolved = resolved
        self._serving: list[Stint] = []
        #: By request where what its client saw came from: stints, by their places.
        self.ways: dict[int, list[int]] = {}
        self._in_system: set[int] = set()
        self._counted_to = 0.0
        self._board = Board(env, self._engines, router, refresh_interval)
        self.size = len(makers)
        for replica, make in enumerate(makers):
            self._start(replica, make)

    def _start(self, replica: int, make: Maker) -> Stint:
        stint = Stint(replica, make(self.env, RANKS * replica), self.env.now)
        stint.engine.ended = lambda life: self._over(stint, life)
        self.stints.append(stint)
        self._serving.append(stint)
        return stint

    def _engines(self) -> list[tuple[int, Engine]]:
        return [(stint.replica, stint.engine) for stint in self._serving]

    @property
    def parts(self) -> dict[str, Record]:
        """The records of the replicas by name; one that came back has several."""
        return {name_of(stint): stint.engine.record for stint in self.stints}

    @property
    def where(self) -> dict[int, str]:
        """By request the replicas that it was sent to, in order: ``3``, or ``3 0`` for two."""
        return {
            i: " ".join(str(self.stints[place].replica) for place in way)
            for i, way in self.ways.items()
        }

    def run(self) -> Process:
        """Start all replicas, as a SimPy process."""
        engines = [stint.engine for stint in self.stints]
        for runs in [LockStep(engines)] if self.lockstep else engines:
            self.env.process(runs.run())
        yield self.env.process(self._board.run())

    def submit(self, request: Request) -> None:
        """A request reaches the router now, which sends it to a replica at once."""
        self._count()
        self._in_system.add(request.id)
        self._send(request)
        self._board.stir()

    def _send(self, request: Request) -> None:
        board = self._board
        signals = [board.signal(s.replica, s.engine, s.in_flight) for s in self._serving]
        chosen = self.router.choose(request, signals)
        stint = next(stint for stint in self._serving if stint.replica == chosen)
        stint.in_flight += 1
        board.sent(chosen)
        self.ways.setdefault(request.id, []).append(self.stints.index(stint))
        stint.engine.submit(request)

    def _over(self, stint: Stint, life: Life) -> None:
        """A request has ended on a replica."""
        if life.request.id in self._in_system:
            stint.in_flight -= 1
            self._count()
            self._in_system.discard(life.request.id)
            if self._resolved:
                self._resolved()
        if self.ended:
            self.ended(life)

    def _count(self, until: float | None = None) -> None:
        """Add up how many requests have been here since this was last done."""
        now = self.env.now if until is None else until
        self.in_system_s += len(self._in_system) * (now - self._counted_to)
        self._counted_to = now

    def conclude(self, requests: Iterable[Request], horizon: float | None) -> Record:
        """The run is over: every request has its outcome; returns the record of the whole."""
        records = [stint.engine.record for stint in self.stints]
        end = max(record.end for record in records) if horizon is None else horizon
        for stint, record in zip(self.stints, records, strict=True):
            if stint.end is None:
                record.end = end
            give_outcomes(record, horizon)
            stint.engine.settle()
        lives = {
            i: [(place, records[place].lives[i]) for place in way] for i, way in self.ways.items()
        }
        self._count_rest([lives[i][-1][1] for i in self._in_system])
        never = Record(0)
        for request in requests:
            if request.id not in lives:
                cut_off(never, request)
                lives[request.id] = [(-1, never.lives[request.id])]
        return whole(records, lives, end)

    def _count_rest(self, lives: Iterable[Life]) -> None:
        """Those who were here at the end leave when their lives end."""
        for life in sorted(lives, key=lambda life: life.ended_at or 0.0):
            self._count(max(life.ended_at or 0.0, self._counted_to))
            self._in_system.discard(life.request.id)
