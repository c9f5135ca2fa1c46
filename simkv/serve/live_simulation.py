"""Run a simulation in real time: requests come from clients, and tokens are sent when they are due.

The arrival of a request and the departure of its client are events at the time at which the server
notices them. A later simulation of the recorded requests therefore gives the same result. If the
process is late, it sends replies late, by the time ``lag``. Every decode step is a separate event,
because every token has to be sent.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from math import inf, nextafter
from typing import Any, TypeVar

import simpy

from simkv.core.errors import InputError
from simkv.core.outcome import Outcome
from simkv.core.request import Request, Segment
from simkv.scenario.scenario import Scenario
from simkv.serve.partial_reply import Reply
from simkv.sim.clock import ExactTimeout
from simkv.sim.fleet.fleet import Fleet
from simkv.sim.replica_base import Replica
from simkv.sim.run_record import RequestRecord
from simkv.sim.simulation import (
    ReplicaSpec,
    build_replica,
    build_server,
    build_session_lookup,
)
from simkv.workload.clients import Clients
from simkv.workload.listed_requests import make_acceptance

T = TypeVar("T")

#: Minimum time (s) between a request's arrival and its client's departure.
MIN_LEAVE_DELAY_S = 1e-6
#: Maximum lateness (s) of asyncio's timers; for shorter waits, the event loop is polled instead.
TIMER_LATENESS_S = 0.001
#: Maximum wall-clock time (s) for which events are processed before sockets are served again.
SLICE_S = 0.002
#: Number of records of ended requests that are kept after old records are dropped, because events
#: in progress at the end of a request may still refer to its record.
KEPT_RECORDS = 10_000
#: Number of the newest steps of each replica that are kept after old records are dropped.
KEPT_STEPS = 100_000
#: Lag (s of wall-clock time) above which a warning is logged.
WARN_LAG_S = 0.1


@dataclass(frozen=True)
class ClientRequest:
    """A client's request: prompt length, generation limits and options.

    ``output_tokens`` is the number of tokens that the model will emit. ``segments`` returns the
    segments of the prompt for a request number.
    """

    prompt_tokens: int
    max_tokens: int
    output_tokens: int
    segments: Callable[[int], Sequence[Segment]]
    priority: int = 0
    ignore_eos: bool = False
    lora: str | None = None


class ServerStoppedError(Exception):
    """Raised if the engine died or the server stopped before a request entered the simulation."""


class LiveSimulation:
    """Simulation of a scenario's engine or fleet, served at ``speed`` times real time.

    ``received`` is the number of received requests, and ``journal`` contains them. ``changes``
    contains them in order of receipt, and again when their client leaves. The history of requests
    and steps is dropped after ``max_history`` requests. ``replicas`` includes replicas that have
    ended.

    The callbacks in ``on_change`` receive each new entry of ``changes``. The callbacks in
    ``on_tokens`` receive a replica and the numbers of requests that get a token. The callbacks in
    ``before_forgetting`` are called before steps are dropped. ``on_request_end`` receives the
    record of each ended request, and ``warn`` receives messages for the operator.
    """

    def __init__(
        self,
        scenario: Scenario,
        specs: Sequence[ReplicaSpec],
        speed: float = 1.0,
        max_history: int | None = None,
    ) -> None:
        self.speed = speed
        self.max_history = max_history
        self.received = 0
        self.journal: list[Request] = []
        self.changes: list[Request] = []
        self.replicas: list[Replica] = []
        self.replies: dict[int, Reply] = {}
        self.on_change: list[Callable[[Request], None]] = []
        self.on_tokens: list[Callable[[Replica, Sequence[int]], None]] = []
        self.before_forgetting: list[Callable[[], None]] = []
        self.on_request_end: Callable[[RequestRecord], None] = lambda _: None
        self.warn: Callable[[str], None] = lambda _: None
        self.started_at = int(time.time())
        self.dead = ""
        self.lag = 0.0
        self._scenario = scenario
        self.server = build_server(scenario, specs, self._make, build_session_lookup(Clients([])))
        self.server.on_request_end = self._ended
        self.env = self.server.env
        self._start = self._warned = -inf
        self._timer: asyncio.Handle | None = None
        self._latest = 0.0
        self._past: deque[int] = deque()
        self._most_rows = 2 * KEPT_STEPS
        self._pending: dict[float, asyncio.Future[Any]] = {}

    def _make(self, spec: ReplicaSpec, env: simpy.Environment, rank: int) -> Replica:
        replica = build_replica(self._scenario, spec, env, rank, leaping=False)
        replica.on_tokens = partial(self._deliver, replica, spec.role != "prefill")
        replica.on_death = partial(self._died, replica)
        self.replicas.append(replica)
        return replica

    # Clock: an asyncio timer for the next event of SimPy's plain environment. The step method of
    # simpy.rt.RealtimeEnvironment sleeps and cannot be woken.

    def start(self) -> None:
        """Start the clock. An event loop must be running."""
        self._loop = asyncio.get_running_loop()
        self._start = time.monotonic()
        self._began = time.time()
        self.env.process(self.server.run())
        self._plan()

    @property
    def now(self) -> float:
        """Simulated time in seconds since the start. ``journal`` is complete until this time."""
        return min(self._pending, default=max(self._elapsed, self.env.now))

    def wall_clock(self, moment: float) -> float:
        """Return the wall-clock time of a simulated time, in seconds since 1970."""
        return self._began + moment / self.speed

    @property
    def _elapsed(self) -> float:
        return (time.monotonic() - self._start) * self.speed

    def _tick(self) -> None:
        """Process the events that are due, and set the timer."""
        with suppress(InputError), self._end_replies_on_error():
            self._process_due()
        self._plan()

    @contextmanager
    def _end_replies_on_error(self) -> Iterator[None]:
        """Context that ends all replies if an error occurs, for example in a custom scheduler."""
        try:
            yield
        except InputError as error:
            self._end_all(str(error))
            raise
        except Exception as error:
            self._end_all(f"internal error in simkv: {error!r}")
            raise

    def _process_due(self) -> None:
        """Process events that are due, for at most one time slice."""
        stop, env = time.monotonic() + SLICE_S, self.env
        while env.peek() <= self._elapsed:
            env.step()
            if time.monotonic() > stop:
                break

    def _note_lag(self, due: float) -> None:
        """Record the delay of the current event, which was due at ``due`` (``time.monotonic``)."""
        now = time.monotonic()
        self.lag = now - due
        if self.lag > WARN_LAG_S and now > self._warned + 5.0:
            self._warned = now
            self.warn(
                f"the server is {1e3 * self.lag:.0f} ms late: it sends replies later than simulated"
            )

    def _plan(self) -> None:
        """Set the timer to the next event."""
        if self._timer is not None:
            self._timer.cancel()
        following = self.env.peek()
        if following == inf:
            self._timer = None
            return
        wait = self._start + following / self.speed - time.monotonic()
        if wait <= TIMER_LATENESS_S:
            self._timer = self._loop.call_soon(self._tick)
        else:
            self._timer = self._loop.call_later(wait - TIMER_LATENESS_S, self._tick)

    # Client actions.

    def _next_moment(self, earliest: float = 0.0) -> float:
        """Return the time of a new client action: after all earlier actions and events."""
        last = nextafter(max(self.env.now, self._latest), inf)
        self._latest = max(self._elapsed, last, earliest)
        return self._latest

    def _schedule(self, action: Callable[[], T], earliest: float = 0.0) -> asyncio.Future[T]:
        """Schedule a client's action at the current simulated time.

        The returned future receives the result, or ServerStoppedError if the engine dies first. A
        cancelled action is not executed.
        """
        done: asyncio.Future[T] = self._loop.create_future()
        moment = self._next_moment(earliest)
        self._pending[moment] = done

        def act(_: simpy.Event) -> None:
            if not done.done():
                done.set_result(action())
            self._pending.pop(moment, None)

        event = ExactTimeout(self.env, moment, ExactTimeout.BEFORE)
        assert event.callbacks is not None
        event.callbacks.append(act)
        if self.dead:
            self._end_pending(f"the engine is dead: {self.dead}")
        self._plan()
        return done

    def submit(self, ask: ClientRequest) -> asyncio.Future[Reply]:
        """Submit a request at the current time. The returned future receives its reply."""
        return self._schedule(partial(self._enter, ask))

    def reject_if_full(self, ask: Callable[[], ClientRequest]) -> asyncio.Future[Reply | None]:
        """Submit a request if the queue limits of all replicas reject it, and return its reply.

        If a replica accepts requests, return None without submitting the request.
        """
        return self._schedule(partial(self._enter_if_full, ask))

    def _enter_if_full(self, ask: Callable[[], ClientRequest]) -> Reply | None:
        if not all(
            replica.queue_limit and replica.queue_limit.find_rejection()
            for replica in self.replicas
        ):
            return None
        answer = self._enter(ask())
        if answer.refusal is None:  # no replica can accept the request
            self.disconnect(answer)
            return None
        return answer

    def _enter(self, ask: ClientRequest) -> Reply:
        number = self.received
        self.received += 1
        request = Request(
            id=number,
            prompt_tokens=ask.prompt_tokens,
            max_tokens=ask.max_tokens,
            arrival=self.env.now,
            priority=ask.priority,
            ignore_eos=ask.ignore_eos,
            lora=ask.lora,
            segments=tuple(ask.segments(number)),
            output_tokens=ask.output_tokens,
            acceptance=make_acceptance(self._scenario.workload.acceptance, number),
        )
        if not self.history_ended:
            self.journal.append(request)
        elif self.journal:
            self.journal.clear()
            self.changes.clear()
            self.warn(f"{number} requests received: the history for /explain was dropped")
        self._note_change(request)
        answer = self.replies[number] = Reply(request)
        self.server.submit(request)
        return answer

    def disconnect(self, answer: Reply, then: Callable[[], None] = lambda: None) -> None:
        """Record that the client of an unfinished reply leaves now.

        ``then`` is called when the request has ended in the simulation.
        """
        request = answer.request
        if request.id not in self.replies:
            then()
            return

        def leave() -> None:
            if self.replies.pop(request.id, None) is not None:
                self._note_departure(request)
                self.server.disconnect(request.id)
            then()

        self._schedule(leave, request.arrival + MIN_LEAVE_DELAY_S)

    def _note_departure(self, request: Request, now: float | None = None) -> None:
        now = self.env.now if now is None else now
        left = replace(request, timeout=now - request.arrival)
        if not self.history_ended:
            self.journal[request.id] = left
        self._note_change(left)

    def _note_change(self, request: Request) -> None:
        if not self.history_ended:
            self.changes.append(request)
        for note in self.on_change:
            note(request)

    def cut_off(self) -> None:
        """End all unfinished replies when the server stops."""
        self._end_pending("the server is shutting down")
        for answer in list(self.replies.values()):
            request = answer.request
            moment = self._next_moment(request.arrival + MIN_LEAVE_DELAY_S)
            self._note_departure(request, moment)
            answer.end(Outcome.CUT_OFF)
        self.replies.clear()

    def _end_pending(self, why: str) -> None:
        for future in self._pending.values():
            if not future.done():
                future.set_exception(ServerStoppedError(why))
                # no task waits for these departures, so their errors must not be logged
                future.exception()
        self._pending.clear()

    # Engine events.

    def _deliver(self, replica: Replica, answers: bool, numbers: Sequence[int]) -> None:
        """Record new tokens of requests. If ``answers`` is true, the tokens are added to the
        replies.
        """
        due = self._start + self.env.now / self.speed
        self._note_lag(due)
        for number, times in groupby(numbers):
            if answers and (answer := self.replies.get(number)):
                answer.add_tokens(due, replica, len(list(times)))
        for tell in self.on_tokens:
            tell(replica, numbers)

    @property
    def history_ended(self) -> bool:
        """Whether the history was dropped after ``max_history`` requests."""
        return self.max_history is not None and self.received > self.max_history

    def _ended(self, life: RequestRecord) -> None:
        self._past.append(life.request.id)
        answer = self.replies.get(life.request.id)
        self.on_request_end(life)
        if self.history_ended:  # not earlier, because the callback may look up steps of the request
            self._forget_old()
        if life.outcome is Outcome.LOST and not isinstance(self.server, Fleet):
            self.warn(f"request {life.request.id}: {life.reason}; its client waits indefinitely")
        elif answer:
            del self.replies[life.request.id]
            answer.end(life.outcome, life.reason, life.refusal)

    def _forget_old(self) -> None:
        """Drop the records of ended requests, and old rows of long step logs."""
        while len(self._past) > KEPT_RECORDS:
            self.server.forget(self._past.popleft())
        if self._num_rows() > self._most_rows:
            for tell in self.before_forgetting:
                tell()
            for replica in self.replicas:
                replica.forget_steps(KEPT_STEPS)
            # The rows of a long request are kept, so the next attempt is not made at the next end
            # of a request.
            self._most_rows = self._num_rows() + KEPT_STEPS

    def _num_rows(self) -> int:
        """Return the number of rows of the longest step log."""
        return max(len(replica.record.steps.end) for replica in self.replicas)

    def _died(self, replica: Replica) -> None:
        stop = replica.record.engine_halt
        self._end_all(stop.why if stop else "the engine died")

    def _end_all(self, why: str) -> None:
        """End all replies because the engine is dead."""
        self.dead = why
        self.warn(f"the engine is dead: {why}")
        for answer in list(self.replies.values()):
            answer.end(Outcome.STALLED, self.dead)
        self.replies.clear()
        self._end_pending(f"the engine is dead: {why}")
