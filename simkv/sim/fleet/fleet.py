"""Fleet of replicas behind a router, with the client interface of a single engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice, zip_longest

import simpy

from simkv.core.outcome import Outcome
from simkv.core.request import Prompt, Request
from simkv.scenario.fleet_section import FleetSettings, Outage
from simkv.sim.clock import ExactTimeout, SimProcess
from simkv.sim.engine import Engine
from simkv.sim.fleet.autoscaler import Autoscaler
from simkv.sim.fleet.data_parallel_lockstep import DataParallelLockstep
from simkv.sim.fleet.fleet_record import merge_records
from simkv.sim.fleet.load_signals import LoadBoard
from simkv.sim.fleet.recurring_tasks import RecurringTasks
from simkv.sim.fleet.replica_lifetime import ReplicaLifetime
from simkv.sim.fleet.routers import LoadSignal, Router
from simkv.sim.fleet.session_admission import SessionAdmission
from simkv.sim.replica_base import LEAVING_REASONS, Replica, assign_outcomes, record_cut_off
from simkv.sim.run_record import EngineHalt, RequestRecord, RunRecord

#: Records of each request, by request id; each record has the index of the run record that contains
#: it.
RecordsByRequest = dict[int, list[tuple[int, RequestRecord]]]
#: Builds the engine of a replica, given the rank of its events.
ReplicaFactory = Callable[[simpy.Environment, int], Replica]
#: A request is not retried after this number of replica failures without a finished request in
#: between, because its cause would probably kill every replica in turn.
MAX_FAILURES = 50
#: Events at equal times are ordered by replica; an engine may use two ranks.
RANKS_PER_REPLICA = 2


class Fleet:
    """Replicas behind a router, with the client interface of a ``Replica``.

    - ``makers``: functions that build an engine, one for each possible replica.
    - ``initial``: number of replicas at the start (default: all).
    - ``resolved``, ``on_request_end``: called when a request has ended.
    - ``sent``: for each request, the lifetimes of replicas to which it was sent, as indices.
    - ``served_by``: for each request, the lifetimes whose tokens its client kept, as indices.
    - ``in_system_s``: number of requests in the fleet, integrated over time.
    """

    # A replica that fails and restarts has several lifetimes. ``in_system_s`` divided by the length
    # of the run is the mean number of requests.

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
        self._admission = router if isinstance(router, SessionAdmission) else None
        self.rules = rules or FleetSettings()
        self.size = len(makers)
        self.on_request_end: Callable[[RequestRecord], None] | None = None
        self.lifetimes: list[ReplicaLifetime] = []
        self.in_system_s = 0.0
        self.sent: dict[int, list[int]] = {}
        self.served_by: dict[int, list[int]] = {}
        self.retries = 0
        self._failures = 0  # replica failures since the last finished request
        self._makers = makers
        self._initial = self.size if initial is None else initial
        self.resolved = resolved
        self._serving: list[ReplicaLifetime] = []
        self._draining: list[ReplicaLifetime] = []
        self._starting: set[int] = set()
        #: Record of the requests that wait for any replica to start.
        self._unrouted = RunRecord(0)
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
        return [(lifetime.replica, lifetime.engine) for lifetime in self._serving]

    @property
    def replica_records(self) -> dict[str, RunRecord]:
        """Record of each replica lifetime, by name."""
        # A replica that restarted has several records.
        return {lifetime.name: lifetime.engine.record for lifetime in self.lifetimes}

    @property
    def routes(self) -> dict[int, str]:
        """Replicas that received each request, in order.

        For example, ``3 0`` stands for replica 3 and then replica 0.
        """
        return {
            i: " ".join(str(self.lifetimes[place].replica) for place in places)
            for i, places in self.sent.items()
        }

    # Starts, failures, drains and scaling of replicas.

    def run(self) -> SimProcess:
        """SimPy process: start the replicas, planned outages, load refreshes and autoscaling."""
        rules = self.rules
        replicas = [lifetime.engine for lifetime in self.lifetimes]
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
        if self._admission:
            interval = self._admission.config.interval
            self.env.process(self._ticks.every(interval, self._check_sessions))
        yield from ()

    def _start(self, replica: int) -> ReplicaLifetime:
        """Start a replica with an empty cache."""
        engine = self._makers[replica](self.env, RANKS_PER_REPLICA * replica)
        lifetime = ReplicaLifetime(replica, engine, len(self.lifetimes), self.env.now)
        engine.on_request_end = lambda life: self._request_ended(lifetime, life)
        if self.rules.lockstep and self.lifetimes:  # data-parallel ranks behind one server
            engine.queue_limit = self.lifetimes[0].engine.queue_limit
        if self.size > 1 and not self.rules.lockstep:
            engine.on_death = lambda: self._fail(lifetime, "its engine died")
        self.lifetimes.append(lifetime)
        self._serve(lifetime)
        return lifetime

    def _serve(self, lifetime: ReplicaLifetime) -> None:
        """Route requests to this replica from now on."""
        self._serving.append(lifetime)
        self._serving.sort(key=lambda lifetime: lifetime.replica)

    def _add(self, replica: int, lag: float = 0.0) -> SimProcess:
        """SimPy process: start a replica after ``lag`` seconds and the cold start."""
        self._starting.add(replica)
        yield ExactTimeout(
            self.env, self.env.now + lag + self.rules.cold_start, ExactTimeout.BEFORE
        )
        self._starting.discard(replica)
        if self._at(replica) is None:
            self.env.process(self._start(replica).engine.run())
            self._route_waiting()

    def _at(self, replica: int) -> ReplicaLifetime | None:
        """Return the present lifetime of a replica, or None."""
        # A lifetime may be draining.
        here = (s for s in (*self._serving, *self._draining) if s.replica == replica)
        return next(here, None)

    def _fail_from_to(self, outage: Outage) -> SimProcess:
        yield ExactTimeout(self.env, outage.at, ExactTimeout.BEFORE)
        if lifetime := self._at(outage.replica):
            self._fail(lifetime, "it failed")
        if outage.back_at is not None:
            yield ExactTimeout(self.env, outage.back_at, ExactTimeout.BEFORE)
            yield from self._add(outage.replica)

    def _drain_from_to(self, outage: Outage) -> SimProcess:
        yield ExactTimeout(self.env, outage.at, ExactTimeout.BEFORE)
        lifetime = self._at(outage.replica)
        if lifetime not in self._serving:
            return
        self._drain(lifetime, for_good=outage.back_at is None)
        if outage.back_at is not None:
            yield ExactTimeout(self.env, outage.back_at, ExactTimeout.BEFORE)
            if lifetime in self._draining:
                self._draining.remove(lifetime)
                self._serve(lifetime)
                self._route_waiting()

    def _drain(self, lifetime: ReplicaLifetime, *, for_good: bool) -> None:
        """Stop sending requests to a replica.

        ``for_good`` ends the replica after its last request.
        """
        self._serving.remove(lifetime)
        self._draining.append(lifetime)
        lifetime.leaving = for_good
        self._leave_if_done(lifetime)

    def _leave_if_done(self, lifetime: ReplicaLifetime) -> None:
        if lifetime.leaving and not lifetime.in_flight and lifetime in self._draining:
            self._draining.remove(lifetime)
            lifetime.engine.halt()
            lifetime.end = self.env.now
            self.router.forget(lifetime.replica)

    def _scale(self) -> float:
        """Adjust the number of replicas.

        Return the time (s) until which only an event can change it.
        """
        current, starting = len(self._serving), len(self._starting)
        signals = [
            LoadSignal(s.replica, s.in_flight, s.engine.num_waiting, s.engine.num_running)
            for s in self._serving
        ]
        want = self._scaler.target_size(
            self.env.now, signals, starting, len(self._unrouted.requests)
        )
        taken = {
            lifetime.replica for lifetime in (*self._serving, *self._draining)
        } | self._starting
        free = (i for i in range(self.size) if i not in taken)
        new = list(islice(free, max(want - current - starting, 0)))
        for replica in new:
            self.env.process(self._add(replica, self._scaler.rule.lag))
        surplus = self._serving[current + min(want - current, 0) :]
        for lifetime in surplus:
            self._drain(lifetime, for_good=True)
        return 0.0 if new or surplus else self._scaler.steady_until

    def _fail(self, lifetime: ReplicaLifetime, why: str) -> None:
        """Remove a failed replica. Its unfinished requests are lost or sent to another replica."""
        for place in (self._serving, self._draining):
            if lifetime in place:
                place.remove(lifetime)
        lifetime.end = self.env.now
        self.router.forget(lifetime.replica)
        self._failures += 1
        why = f"replica {lifetime.replica}: {why}"
        for life in lifetime.engine.halt():
            if self.rules.on_failure == "lose" or self._failures > MAX_FAILURES:
                lifetime.engine.resolve(life, Outcome.LOST, why)
                continue
            life.outcome, life.ended_at = Outcome.CUT_OFF, self.env.now
            life.reason = f"{why}; the request was sent to another replica"
            self.retries += 1
            self.served_by[life.request.id] = []
            self._send(life.request)

    # Arrival and end of requests.

    def submit(self, request: Request) -> None:
        """Receive a request and route it to a replica.

        If there is no replica, the request waits.
        """
        self._integrate()
        self._in_system.add(request.id)
        self._send(request)
        self._ticks.notify()

    def _send(self, request: Request) -> None:
        if not self._serving:
            self._wait_for_replica(request)
            return
        if self._admission and not self._admission.admits(request, self._replicas()):
            self._wait_for_replica(request)
            self.env.process(self._force(request))
            return
        self._submit(request)

    def _submit(self, request: Request) -> None:
        self._choose(self._serving, self.router, self._board, request).engine.submit(request)

    def _replicas(self) -> list[int]:
        return [lifetime.replica for lifetime in self._serving]

    def _check_sessions(self) -> float:
        """Resume and pause sessions. Send the requests that are no longer held."""
        assert self._admission
        self._submit_held(self._admission.check(self.env.now))
        return 0.0

    def _force(self, request: Request) -> SimProcess:
        """SimPy process: send a request that the router has held for too long."""
        assert self._admission
        yield self.env.timeout(self._admission.config.forced_after)
        self._submit_held(self._admission.force(request))

    def _submit_held(self, prompts: Iterable[Prompt]) -> None:
        for prompt in prompts:
            self._submit(self._unrouted.requests.pop(prompt.id).request)

    def _choose(
        self,
        lifetimes: Sequence[ReplicaLifetime],
        router: Router,
        board: LoadBoard,
        request: Request,
    ) -> ReplicaLifetime:
        """Choose a replica for a request and record the choice."""
        # The caller submits the request.
        chosen = router.choose(request, board.signals(lifetimes))
        lifetime = next(lifetime for lifetime in lifetimes if lifetime.replica == chosen)
        lifetime.in_flight += 1
        board.record_sent(chosen)
        for places in (self.sent, self.served_by):
            places.setdefault(request.id, []).append(lifetime.index)
        return lifetime

    def _wait_for_replica(self, request: Request) -> None:
        life = self._unrouted.arrive(request)
        if life.deadline is not None:
            patience = self.env.timeout(max(life.deadline - self.env.now, 0.0))
            patience.callbacks.append(lambda _: self._give_up(life))

    def _give_up(self, life: RequestRecord, outcome: Outcome = Outcome.STARVED) -> None:
        if self._unrouted.requests.get(life.request.id) is life and life.outcome is None:
            life.outcome, life.reason = outcome, LEAVING_REASONS[outcome]
            life.ended_at = self.env.now
            self._remove(life)

    def disconnect(self, request_id: int, outcome: Outcome = Outcome.STARVED) -> None:
        """Record that the client of a request has left. The request ends with ``outcome``."""
        self._ticks.notify()
        if life := self._unrouted.requests.get(request_id):
            self._give_up(life, outcome)
        else:
            self.lifetimes[self.sent[request_id][-1]].engine.disconnect(request_id, outcome)

    def forget(self, request_id: int) -> None:
        """Remove an ended request from all records to free memory."""
        # The record of the run then does not contain the request.
        self.served_by.pop(request_id, None)
        self._unrouted.requests.pop(request_id, None)
        for place in self.sent.pop(request_id, ()):
            self.lifetimes[place].engine.forget(request_id)

    def _route_waiting(self) -> None:
        """Route the requests that waited for a replica."""
        for life in list(self._unrouted.requests.values()):
            if life.outcome is None:
                del self._unrouted.requests[life.request.id]
                self._send(life.request)

    def _request_ended(self, lifetime: ReplicaLifetime, life: RequestRecord) -> None:
        """Record that a request has ended on a replica."""
        if life.outcome is Outcome.FINISHED:
            self._failures = 0
        if life.request.id in self._in_system:
            lifetime.in_flight -= 1
        self._remove(life)
        self._leave_if_done(lifetime)

    def _remove(self, life: RequestRecord) -> None:
        """Remove an ended request from the requests in the fleet and call ``on_request_end``."""
        if self._admission:
            tokens = life.request.prompt_tokens + life.tokens
            self._admission.ended(life.request, tokens, self.env.now)
        if life.request.id in self._in_system:
            self._integrate()
            self._in_system.discard(life.request.id)
            if self.resolved:
                self.resolved()
        if self.on_request_end:
            self.on_request_end(life)

    def _integrate(self, until: float | None = None) -> None:
        """Add the number of requests in the fleet to its integral over time."""
        now = self.env.now if until is None else until
        self.in_system_s += len(self._in_system) * (now - self._counted_to)
        self._counted_to = now

    def conclude(self, requests: Iterable[Request], horizon: float | None) -> RunRecord:
        """End the run. Assign an outcome to every request and return the record of the fleet."""
        unrouted = self._unrouted
        records = [*(lifetime.engine.record for lifetime in self.lifetimes), unrouted]
        ends = [record.end for record in records]
        ends += [
            life.request.arrival if life.ended_at is None else life.ended_at
            for life in unrouted.requests.values()
        ]
        end = max(ends) if horizon is None else horizon
        stuck = [i for i, life in unrouted.requests.items() if life.outcome is None]
        if stuck and horizon is None:
            unrouted.engine_halt = EngineHalt("deadlock", end, "no replica accepts requests", stuck)
        for record, lifetime in zip_longest(records, self.lifetimes):
            if lifetime is None or lifetime.end is None:
                record.end = end
            assign_outcomes(record, horizon)
        for lifetime in self.lifetimes:
            lifetime.engine.finalize()
        lives = {
            i: [(place, records[place].requests[i]) for place in places]
            for i, places in self.served_by.items()
        }
        lives |= {i: [(len(self.lifetimes), life)] for i, life in unrouted.requests.items()}
        self._integrate_rest([lives[i][-1][1] for i in self._in_system])
        for request in requests:
            if request.id not in lives:
                record_cut_off(unrouted, request)
                lives[request.id] = [(len(self.lifetimes), unrouted.requests[request.id])]
        seen = {i: {place for place, _ in way} for i, way in lives.items()}
        unobserved = {
            i: [(place, records[place].requests[i]) for place in places if place not in seen[i]]
            for i, places in self.sent.items()
            if not seen[i].issuperset(places)
        }
        return self._merge(records, lives, end, unobserved)

    def _merge(
        self,
        records: list[RunRecord],
        lives: RecordsByRequest,
        end: float,
        unobserved: RecordsByRequest,
    ) -> RunRecord:
        return merge_records(records, lives, end, unobserved=unobserved)

    def _integrate_rest(self, lives: Iterable[RequestRecord]) -> None:
        """Add the requests that are still in the fleet to the integral over time."""
        # Each request counts until the time when its record ends.
        for life in sorted(lives, key=lambda life: life.ended_at or 0.0):
            self._integrate(max(life.ended_at or 0.0, self._counted_to))
            self._in_system.discard(life.request.id)
