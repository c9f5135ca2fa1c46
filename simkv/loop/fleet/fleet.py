"""A fleet: replicas behind a router. To the clients it is what one engine is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice, zip_longest

import simpy

from simkv.core.outcome import Outcome
from simkv.core.request import Request
from simkv.loop.clock import Moment, Process
from simkv.loop.engine import Engine
from simkv.loop.fleet.autoscale import Scaler
from simkv.loop.fleet.lockstep import LockStep
from simkv.loop.fleet.merge import whole
from simkv.loop.fleet.routers import Router, Signal
from simkv.loop.fleet.signals import LoadBoard
from simkv.loop.fleet.stint import Stint
from simkv.loop.fleet.ticks import Recurring
from simkv.loop.outcomes import cut_off, give_outcomes
from simkv.loop.record import Life, Record, Standstill
from simkv.loop.replica import Replica
from simkv.scenario.fleet import FleetRules, Outage

#: By request the lives that it led, each with the index of the record that holds it.
Ways = dict[int, list[tuple[int, Life]]]
#: Makes the engine of a replica, given the rank of its moments.
Maker = Callable[[simpy.Environment, int], Replica]
#: When so many replicas have failed and no answer was finished in between, requests are not sent
#: to yet another one: whatever kills them would go on for ever.
MOST_DEATHS = 50
#: Moments of one time go by replica; an engine may use two ranks.
RANKS = 2


class Fleet:
    """Replicas in one world; ``submit`` and the rest as for a ``Replica``.

    ``makers`` make the engines, one per replica that there is or may be; ``initial`` of them are
    there from the start (all, if nothing is said). ``resolved`` is called whenever a request has
    ended, and ``ended`` is told how.

    ``in_system_s`` adds up, over time, how many requests are in the fleet: over the length of the
    run it is their mean number. ``sent`` are the places of the stints that a request was sent to,
    ``ways`` those of them whose tokens its client has kept.
    """

    def __init__(
        self,
        env: simpy.Environment,
        makers: Sequence[Maker],
        router: Router,
        rules: FleetRules | None = None,
        resolved: Callable[[], None] | None = None,
        initial: int | None = None,
    ) -> None:
        self.env = env
        self.router = router
        self.rules = rules or FleetRules()
        self.size = len(makers)
        self.ended: Callable[[Life], None] | None = None
        self.stints: list[Stint] = []
        self.in_system_s = 0.0
        self.sent: dict[int, list[int]] = {}
        self.ways: dict[int, list[int]] = {}
        self.retries = 0
        self._deaths = 0  # since an answer was finished
        self._makers = makers
        self._initial = self.size if initial is None else initial
        self.resolved = resolved
        self._serving: list[Stint] = []
        self._draining: list[Stint] = []
        self._coming: set[int] = set()
        #: Requests that wait for a replica to be there.
        self._door = Record(0)
        self._in_system: set[int] = set()
        self._counted_to = 0.0
        self._ticks = Recurring(env)
        self._board = LoadBoard(self._engines, router, self.rules.refresh_interval)
        if self.rules.autoscale:
            self._scaler = Scaler(self.rules.autoscale)
        for replica in range(0 if self.rules.start_cold else self._initial):
            self._start(replica)

    # What it is made of.

    def _engines(self) -> list[tuple[int, Replica]]:
        return [(stint.replica, stint.engine) for stint in self._serving]

    @property
    def parts(self) -> dict[str, Record]:
        """The records of the replicas by name; one that came back has several."""
        return {stint.name: stint.engine.record for stint in self.stints}

    @property
    def where(self) -> dict[int, str]:
        """By request the replicas that it was sent to, in order: ``3``, or ``3 0`` for two."""
        return {
            i: " ".join(str(self.stints[place].replica) for place in places)
            for i, places in self.sent.items()
        }

    # Replicas come and go.

    def run(self) -> Process:
        """Start all that goes on by itself, as a SimPy process."""
        rules = self.rules
        replicas = [stint.engine for stint in self.stints]
        if rules.lockstep:
            self.env.process(LockStep([e for e in replicas if isinstance(e, Engine)]).run())
        else:
            for replica in replicas:
                self.env.process(replica.run())
        for number in range(self._initial if rules.start_cold else 0):
            self.env.process(self._add(number))
        for outage in rules.failures:
            self.env.process(self._fail_from_to(outage))
        for outage in rules.drains:
            self.env.process(self._drain_from_to(outage))
        if self._board.interval:
            self.env.process(self._ticks.every(self._board.interval, self._board.refresh))
        if rules.autoscale:
            self.env.process(self._ticks.every(rules.autoscale.interval, self._scale))
        yield from ()

    def _start(self, replica: int) -> Stint:
        """A replica is there, with an empty cache."""
        engine = self._makers[replica](self.env, RANKS * replica)
        stint = Stint(replica, engine, len(self.stints), self.env.now)
        engine.ended = lambda life: self._over(stint, life)
        if self.rules.lockstep and self.stints:  # ranks behind one server
            engine.door = self.stints[0].engine.door
        if self.size > 1 and not self.rules.lockstep:
            engine.died = lambda: self._fail(stint, "its engine died")
        self.stints.append(stint)
        self._serve(stint)
        return stint

    def _serve(self, stint: Stint) -> None:
        """From now on it takes requests."""
        self._serving.append(stint)
        self._serving.sort(key=lambda stint: stint.replica)

    def _add(self, replica: int, lag: float = 0.0) -> Process:
        """A replica is started, and takes requests when it is warm."""
        self._coming.add(replica)
        yield Moment(self.env, self.env.now + lag + self.rules.cold_start, Moment.BEFORE)
        self._coming.discard(replica)
        if self._at(replica) is None:
            self.env.process(self._start(replica).engine.run())
            self._let_in()

    def _at(self, replica: int) -> Stint | None:
        """The stint of a replica that is there, if only to end what it has."""
        here = (s for s in (*self._serving, *self._draining) if s.replica == replica)
        return next(here, None)

    def _fail_from_to(self, outage: Outage) -> Process:
        yield Moment(self.env, outage.at, Moment.BEFORE)
        if stint := self._at(outage.replica):
            self._fail(stint, "it failed")
        if outage.back_at is not None:
            yield Moment(self.env, outage.back_at, Moment.BEFORE)
            yield from self._add(outage.replica)

    def _drain_from_to(self, outage: Outage) -> Process:
        yield Moment(self.env, outage.at, Moment.BEFORE)
        stint = self._at(outage.replica)
        if stint not in self._serving:
            return
        self._drain(stint, for_good=outage.back_at is None)
        if outage.back_at is not None:
            yield Moment(self.env, outage.back_at, Moment.BEFORE)
            if stint in self._draining:
                self._draining.remove(stint)
                self._serve(stint)
                self._let_in()

    def _drain(self, stint: Stint, *, for_good: bool) -> None:
        """A replica takes no requests any more."""
        self._serving.remove(stint)
        self._draining.append(stint)
        stint.leaving = for_good
        self._leave_if_done(stint)

    def _leave_if_done(self, stint: Stint) -> None:
        if stint.leaving and not stint.in_flight and stint in self._draining:
            self._draining.remove(stint)
            stint.engine.halt()
            stint.end = self.env.now
            self.router.forget(stint.replica)

    def _scale(self) -> bool:
        """Look whether there are as many replicas as there should be."""
        there, coming = len(self._serving), len(self._coming)
        signals = [
            Signal(s.replica, s.in_flight, s.engine.num_waiting, s.engine.num_running)
            for s in self._serving
        ]
        want = self._scaler.wanted(self.env.now, signals, coming, len(self._door.lives))
        taken = {stint.replica for stint in (*self._serving, *self._draining)} | self._coming
        free = (i for i in range(self.size) if i not in taken)
        for replica in islice(free, max(want - there - coming, 0)):
            self.env.process(self._add(replica, self._scaler.rule.lag))
        for stint in self._serving[there + min(want - there, 0) :]:
            self._drain(stint, for_good=True)
        at_least = len(self._serving) + len(self._coming) <= self._scaler.rule.min_replicas
        return at_least and not self._in_system and not self._coming

    def _fail(self, stint: Stint, why: str) -> None:
        """A replica is gone, with all that it had."""
        for place in (self._serving, self._draining):
            if stint in place:
                place.remove(stint)
        stint.end = self.env.now
        self.router.forget(stint.replica)
        self._deaths += 1
        why = f"replica {stint.replica}: {why}"
        for life in stint.engine.halt():
            if self.rules.on_failure == "lose" or self._deaths > MOST_DEATHS:
                stint.engine.resolve(life, Outcome.LOST, why)
                continue
            life.outcome, life.ended_at = Outcome.CUT_OFF, self.env.now
            life.reason = f"{why}; the request was sent to another one"
            self.retries += 1
            self.ways[life.request.id] = []
            self._send(life.request)

    # Requests come and go.

    def submit(self, request: Request) -> None:
        """A request reaches the router now, which sends it to a replica, if there is one."""
        self._count()
        self._in_system.add(request.id)
        self._send(request)
        self._ticks.stir()

    def _send(self, request: Request) -> None:
        if not self._serving:
            self._wait_at_door(request)
            return
        self._choose(self._serving, self.router, self._board, request).engine.submit(request)

    def _choose(
        self, stints: Sequence[Stint], router: Router, board: LoadBoard, request: Request
    ) -> Stint:
        """The replica that a request is sent to now; all but the sending is done."""
        chosen = router.choose(request, board.signals(stints))
        stint = next(stint for stint in stints if stint.replica == chosen)
        stint.in_flight += 1
        board.sent(chosen)
        for places in (self.sent, self.ways):
            places.setdefault(request.id, []).append(stint.place)
        return stint

    def _wait_at_door(self, request: Request) -> None:
        life = self._door.arrive(request)
        if life.deadline is not None:
            patience = self.env.timeout(max(life.deadline - self.env.now, 0.0))
            patience.callbacks.append(lambda _: self._give_up(life))

    def _give_up(self, life: Life) -> None:
        if self._door.lives.get(life.request.id) is life:
            life.outcome, life.reason = Outcome.STARVED, "the client gave up"
            life.ended_at = self.env.now
            self._left(life)

    def leave(self, request_id: int) -> None:
        """The client of a request that came is gone now."""
        if life := self._door.lives.get(request_id):
            self._give_up(life)
        else:
            self.stints[self.sent[request_id][-1]].engine.leave(request_id)

    def _let_in(self) -> None:
        """A replica is there: those who wait at the door are sent on."""
        for life in list(self._door.lives.values()):
            if life.outcome is None:
                del self._door.lives[life.request.id]
                self._send(life.request)

    def _over(self, stint: Stint, life: Life) -> None:
        """A request has ended on a replica."""
        if life.outcome is Outcome.FINISHED:
            self._deaths = 0
        if life.request.id in self._in_system:
            stint.in_flight -= 1
        self._left(life)
        self._leave_if_done(stint)

    def _left(self, life: Life) -> None:
        """A request has ended."""
        if life.request.id in self._in_system:
            self._count()
            self._in_system.discard(life.request.id)
            if self.resolved:
                self.resolved()
        if self.ended:
            self.ended(life)

    def _count(self, until: float | None = None) -> None:
        """Add up how many requests have been here since this was last done."""
        now = self.env.now if until is None else until
        self.in_system_s += len(self._in_system) * (now - self._counted_to)
        self._counted_to = now

    def conclude(self, requests: Iterable[Request], horizon: float | None) -> Record:
        """The run is over: every request has its outcome; returns the record of the whole."""
        door = self._door
        records = [*(stint.engine.record for stint in self.stints), door]
        ends = [record.end for record in records]
        ends += [
            life.request.arrival if life.ended_at is None else life.ended_at
            for life in door.lives.values()
        ]
        end = max(ends) if horizon is None else horizon
        stuck = [i for i, life in door.lives.items() if life.outcome is None]
        if stuck and horizon is None:
            door.standstill = Standstill("deadlock", end, "no replica takes requests", stuck)
        for record, stint in zip_longest(records, self.stints):
            if stint is None or stint.end is None:
                record.end = end
            give_outcomes(record, horizon)
        for stint in self.stints:
            stint.engine.settle()
        lives = {
            i: [(place, records[place].lives[i]) for place in places]
            for i, places in self.ways.items()
        }
        lives |= {i: [(len(self.stints), life)] for i, life in door.lives.items()}
        self._count_rest([lives[i][-1][1] for i in self._in_system])
        for request in requests:
            if request.id not in lives:
                cut_off(door, request)
                lives[request.id] = [(len(self.stints), door.lives[request.id])]
        seen = {i: {place for place, _ in way} for i, way in lives.items()}
        in_vain = {
            i: [(place, records[place].lives[i]) for place in places if place not in seen[i]]
            for i, places in self.sent.items()
            if not seen[i].issuperset(places)
        }
        return self._whole(records, lives, end, in_vain)

    def _whole(self, records: list[Record], lives: Ways, end: float, in_vain: Ways) -> Record:
        return whole(records, lives, end, in_vain=in_vain)

    def _count_rest(self, lives: Iterable[Life]) -> None:
        """Those who were here at the end leave when their lives end."""
        for life in sorted(lives, key=lambda life: life.ended_at or 0.0):
            self._count(max(life.ended_at or 0.0, self._counted_to))
            self._in_system.discard(life.request.id)
