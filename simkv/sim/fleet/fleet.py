"""A fleet: replicas behind a router, with the client interface of a single engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice, zip_longest

import simpy

from simkv.core.outcome import Outcome
from simkv.core.request import Request
from simkv.scenario.fleet_section import FleetSettings, Outage
from simkv.sim.clock import ExactTimeout, SimProcess
from simkv.sim.engine import Engine
from simkv.sim.final_outcomes import assign_outcomes, record_cut_off
from simkv.sim.fleet.autoscaler import Autoscaler
from simkv.sim.fleet.data_parallel_lockstep import DataParallelLockstep
from simkv.sim.fleet.fleet_record import merge_records
from simkv.sim.fleet.load_signals import LoadBoard
from simkv.sim.fleet.recurring_tasks import RecurringTasks
from simkv.sim.fleet.replica_lifetime import ReplicaLifetime
from simkv.sim.fleet.routers import LoadSignal, Router
from simkv.sim.replica_base import Replica
from simkv.sim.run_record import EngineHalt, RequestRecord, RunRecord

#: Records of a request, each with the index of the run record that contains it, by request.
RecordsByRequest = dict[int, list[tuple[int, RequestRecord]]]
#: Builds the engine of a replica, given the rank of its events.
ReplicaFactory = Callable[[simpy.Environment, int], Replica]
#: After this number of replica failures without a finished request in between, requests are not
#: sent to another replica: the cause would kill every replica in turn.
MAX_FAILURES = 50
#: Events at equal times are ordered by replica; an engine may use two ranks.
RANKS_PER_REPLICA = 2


class Fleet:
    """Replicas in one simulation, with the interface of a ``Replica`` (``submit`` and others).

    ``makers`` build the engines, one per possible replica; the first ``initial`` of them exist from
    the start (default: all). ``resolved`` is called whenever a request has ended, ``ended`` with
    its record.

    ``in_system_s`` is the number of requests in the fleet, integrated over time; divided by the
    length of the run it is their mean number. ``sent`` maps a request to the lifetimes (indices) it
    was sent to, ``served_by`` to the lifetimes whose tokens its client kept.
    """

    def __init__(
        self,
        env: simpy.Environment,
        makers: Sequence[ReplicaFactory],
        router: Router,
        rules: FleetSettings | None = None,
        resolved: Callable[[], None] | None = None,
        initial: int | None = None,
    ) -> None:
        self.env = env
        self.router = router
        self.rules = rules or FleetSettings()
        self.size = len(makers)
        self.ended: Callable[[RequestRecord], None] | None = None
        self.lifetimes: list[ReplicaLifetime] = []
        self.in_system_s = 0.0
        self.sent: dict[int, list[int]] = {}
        self.served_by: dict[int, list[int]] = {}
        self.retries = 0
        self._deaths = 0  # replica failures since the last finished request
        self._makers = makers
        self._initial = self.size if initial is None else initial
        self.resolved = resolved
        self._serving: list[ReplicaLifetime] = []
        self._draining: list[ReplicaLifetime] = []
        self._coming: set[int] = set()
        #: Requests that wait for any replica to start.
        self._door = RunRecord(0)
        self._in_system: set[int] = set()
        self._counted_to = 0.0
        self._ticks = RecurringTasks(env)
        self._board = LoadBoard(self._engines, router, self.rules.refresh_interval)
        if self.rules.autoscale:
            self._scaler = Autoscaler(self.rules.autoscale)
        for replica in range(0 if self.rules.start_cold else self._initial):
            self._start(replica)

    # Replicas and records.

    def _engines(self) -> list[tuple[int, Replica]]:
        return [(stint.replica, stint.engine) for stint in self._serving]

    @property
    def parts(self) -> dict[str, RunRecord]:
        """Records of the replica lifetimes by name; a replica that restarted has several."""
        return {stint.name: stint.engine.record for stint in self.lifetimes}

    @property
    def where(self) -> dict[int, str]:
        """Replicas that each request was sent to, in order: ``3``, or ``3 0`` for two."""
        return {
            i: " ".join(str(self.lifetimes[place].replica) for place in places)
            for i, places in self.sent.items()
        }

    # Starts, failures, drains and scaling of replicas.

    def run(self) -> SimProcess:
        """SimPy process: start the replicas, planned outages, load refreshes and autoscaling."""
        rules = self.rules
        replicas = [stint.engine for stint in self.lifetimes]
        if rules.lockstep:
            self.env.process(
                DataParallelLockstep([e for e in replicas if isinstance(e, Engine)]).run()
            )
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

    def _start(self, replica: int) -> ReplicaLifetime:
        """Start a replica with an empty cache."""
        engine = self._makers[replica](self.env, RANKS_PER_REPLICA * replica)
        stint = ReplicaLifetime(replica, engine, len(self.lifetimes), self.env.now)
        engine.ended = lambda life: self._over(stint, life)
        if self.rules.lockstep and self.lifetimes:  # ranks behind one server
            engine.queue_limit = self.lifetimes[0].engine.queue_limit
        if self.size > 1 and not self.rules.lockstep:
            engine.died = lambda: self._fail(stint, "its engine died")
        self.lifetimes.append(stint)
        self._serve(stint)
        return stint

    def _serve(self, stint: ReplicaLifetime) -> None:
        """Route requests to this replica from now on."""
        self._serving.append(stint)
        self._serving.sort(key=lambda stint: stint.replica)

    def _add(self, replica: int, lag: float = 0.0) -> SimProcess:
        """SimPy process: start a replica after ``lag`` and its cold start (s)."""
        self._coming.add(replica)
        yield ExactTimeout(
            self.env, self.env.now + lag + self.rules.cold_start, ExactTimeout.BEFORE
        )
        self._coming.discard(replica)
        if self._at(replica) is None:
            self.env.process(self._start(replica).engine.run())
            self._let_in()

    def _at(self, replica: int) -> ReplicaLifetime | None:
        """Return the present lifetime of a replica, which may be draining, or None."""
        here = (s for s in (*self._serving, *self._draining) if s.replica == replica)
        return next(here, None)

    def _fail_from_to(self, outage: Outage) -> SimProcess:
        yield ExactTimeout(self.env, outage.at, ExactTimeout.BEFORE)
        if stint := self._at(outage.replica):
            self._fail(stint, "it failed")
        if outage.back_at is not None:
            yield ExactTimeout(self.env, outage.back_at, ExactTimeout.BEFORE)
            yield from self._add(outage.replica)

    def _drain_from_to(self, outage: Outage) -> SimProcess:
        yield ExactTimeout(self.env, outage.at, ExactTimeout.BEFORE)
        stint = self._at(outage.replica)
        if stint not in self._serving:
            return
        self._drain(stint, for_good=outage.back_at is None)
        if outage.back_at is not None:
            yield ExactTimeout(self.env, outage.back_at, ExactTimeout.BEFORE)
            if stint in self._draining:
                self._draining.remove(stint)
                self._serve(stint)
                self._let_in()

    def _drain(self, stint: ReplicaLifetime, *, for_good: bool) -> None:
        """Stop sending requests to a replica."""
        self._serving.remove(stint)
        self._draining.append(stint)
        stint.leaving = for_good
        self._leave_if_done(stint)

    def _leave_if_done(self, stint: ReplicaLifetime) -> None:
        if stint.leaving and not stint.in_flight and stint in self._draining:
            self._draining.remove(stint)
            stint.engine.halt()
            stint.end = self.env.now
            self.router.forget(stint.replica)

    def _scale(self) -> bool:
        """Adjust the number of replicas; return whether checks can pause until the next event."""
        there, coming = len(self._serving), len(self._coming)
        signals = [
            LoadSignal(s.replica, s.in_flight, s.engine.num_waiting, s.engine.num_running)
            for s in self._serving
        ]
        want = self._scaler.wanted(self.env.now, signals, coming, len(self._door.requests))
        taken = {stint.replica for stint in (*self._serving, *self._draining)} | self._coming
        free = (i for i in range(self.size) if i not in taken)
        for replica in islice(free, max(want - there - coming, 0)):
            self.env.process(self._add(replica, self._scaler.rule.lag))
        for stint in self._serving[there + min(want - there, 0) :]:
            self._drain(stint, for_good=True)
        at_least = len(self._serving) + len(self._coming) <= self._scaler.rule.min_replicas
        return at_least and not self._in_system and not self._coming

    def _fail(self, stint: ReplicaLifetime, why: str) -> None:
        """Remove a failed replica; its requests are lost or sent again."""
        for place in (self._serving, self._draining):
            if stint in place:
                place.remove(stint)
        stint.end = self.env.now
        self.router.forget(stint.replica)
        self._deaths += 1
        why = f"replica {stint.replica}: {why}"
        for life in stint.engine.halt():
            if self.rules.on_failure == "lose" or self._deaths > MAX_FAILURES:
                stint.engine.resolve(life, Outcome.LOST, why)
                continue
            life.outcome, life.ended_at = Outcome.CUT_OFF, self.env.now
            life.reason = f"{why}; the request was sent to another replica"
            self.retries += 1
            self.served_by[life.request.id] = []
            self._send(life.request)

    # Arrival and end of requests.

    def submit(self, request: Request) -> None:
        """Receive a request now and route it to a replica, if there is one."""
        self._count()
        self._in_system.add(request.id)
        self._send(request)
        self._ticks.notify()

    def _send(self, request: Request) -> None:
        if not self._serving:
            self._wait_at_door(request)
            return
        self._choose(self._serving, self.router, self._board, request).engine.submit(request)

    def _choose(
        self, stints: Sequence[ReplicaLifetime], router: Router, board: LoadBoard, request: Request
    ) -> ReplicaLifetime:
        """Choose a replica for a request and record the choice; the caller submits the request."""
        chosen = router.choose(request, board.signals(stints))
        stint = next(stint for stint in stints if stint.replica == chosen)
        stint.in_flight += 1
        board.sent(chosen)
        for places in (self.sent, self.served_by):
            places.setdefault(request.id, []).append(stint.place)
        return stint

    def _wait_at_door(self, request: Request) -> None:
        life = self._door.arrive(request)
        if life.deadline is not None:
            patience = self.env.timeout(max(life.deadline - self.env.now, 0.0))
            patience.callbacks.append(lambda _: self._give_up(life))

    def _give_up(self, life: RequestRecord) -> None:
        if self._door.requests.get(life.request.id) is life:
            life.outcome, life.reason = Outcome.STARVED, "the client gave up"
            life.ended_at = self.env.now
            self._left(life)

    def leave(self, request_id: int) -> None:
        """Record that the client of a submitted request has left."""
        if life := self._door.requests.get(request_id):
            self._give_up(life)
        else:
            self.lifetimes[self.sent[request_id][-1]].engine.leave(request_id)

    def _let_in(self) -> None:
        """Route the requests that waited for a replica."""
        for life in list(self._door.requests.values()):
            if life.outcome is None:
                del self._door.requests[life.request.id]
                self._send(life.request)

    def _over(self, stint: ReplicaLifetime, life: RequestRecord) -> None:
        """Record that a request has ended on a replica."""
        if life.outcome is Outcome.FINISHED:
            self._deaths = 0
        if life.request.id in self._in_system:
            stint.in_flight -= 1
        self._left(life)
        self._leave_if_done(stint)

    def _left(self, life: RequestRecord) -> None:
        """Record that a request has ended."""
        if life.request.id in self._in_system:
            self._count()
            self._in_system.discard(life.request.id)
            if self.resolved:
                self.resolved()
        if self.ended:
            self.ended(life)

    def _count(self, until: float | None = None) -> None:
        """Add the number of requests in the fleet to its integral over time."""
        now = self.env.now if until is None else until
        self.in_system_s += len(self._in_system) * (now - self._counted_to)
        self._counted_to = now

    def conclude(self, requests: Iterable[Request], horizon: float | None) -> RunRecord:
        """End the run: assign an outcome to every request; return the record of the fleet."""
        door = self._door
        records = [*(stint.engine.record for stint in self.lifetimes), door]
        ends = [record.end for record in records]
        ends += [
            life.request.arrival if life.ended_at is None else life.ended_at
            for life in door.requests.values()
        ]
        end = max(ends) if horizon is None else horizon
        stuck = [i for i, life in door.requests.items() if life.outcome is None]
        if stuck and horizon is None:
            door.engine_halt = EngineHalt("deadlock", end, "no replica accepts requests", stuck)
        for record, stint in zip_longest(records, self.lifetimes):
            if stint is None or stint.end is None:
                record.end = end
            assign_outcomes(record, horizon)
        for stint in self.lifetimes:
            stint.engine.finalize()
        lives = {
            i: [(place, records[place].requests[i]) for place in places]
            for i, places in self.served_by.items()
        }
        lives |= {i: [(len(self.lifetimes), life)] for i, life in door.requests.items()}
        self._count_rest([lives[i][-1][1] for i in self._in_system])
        for request in requests:
            if request.id not in lives:
                record_cut_off(door, request)
                lives[request.id] = [(len(self.lifetimes), door.requests[request.id])]
        seen = {i: {place for place, _ in way} for i, way in lives.items()}
        in_vain = {
            i: [(place, records[place].requests[i]) for place in places if place not in seen[i]]
            for i, places in self.sent.items()
            if not seen[i].issuperset(places)
        }
        return self._whole(records, lives, end, in_vain)

    def _whole(
        self,
        records: list[RunRecord],
        lives: RecordsByRequest,
        end: float,
        in_vain: RecordsByRequest,
    ) -> RunRecord:
        return merge_records(records, lives, end, in_vain=in_vain)

    def _count_rest(self, lives: Iterable[RequestRecord]) -> None:
        """Count requests still in the fleet until their records end."""
        for life in sorted(lives, key=lambda life: life.ended_at or 0.0):
            self._count(max(life.ended_at or 0.0, self._counted_to))
            self._in_system.discard(life.request.id)
