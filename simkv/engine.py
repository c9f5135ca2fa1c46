"""The loop: arrivals, schedule calls, steps, token delivery and client timeouts in SimPy time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Hashable, Iterable
from dataclasses import dataclass
from typing import Any

import simpy
from simpy.events import EventPriority

from simkv.executors import Executor, load_of
from simkv.record import Life, Outcome, Record, Standstill
from simkv.request import Request
from simkv.schedulers.base import Batch, Livelock, Scheduler

Process = Generator[simpy.Event, Any, None]


class _Moment(simpy.Event):
    """A timeout that comes after all other events of its time.

    So a schedule call sees whatever arrived up to its own time, and what it sees does not depend
    on the order in which events were queued.
    """

    def __init__(self, env: simpy.Environment, time: float) -> None:
        super().__init__(env)
        self._ok = True
        self._value = None
        env.schedule(self, EventPriority(2), max(time - env.now, 0.0))


@dataclass(slots=True)
class _InFlight:
    batch: Batch
    end: float


class Engine:
    """One replica: a scheduler, an executor and the record of what they did.

    Start ``run()`` as a SimPy process and hand requests to ``submit``. A batch of a pipelined
    scheduler (``pipeline_depth`` 2) is decided while its predecessor runs. Requests that come
    before ``ready`` (s) wait until then. ``resolved`` is called whenever a request has ended.
    """

    def __init__(
        self,
        env: simpy.Environment,
        scheduler: Scheduler,
        executor: Executor,
        ready: float = 0.0,
        resolved: Callable[[], None] | None = None,
    ) -> None:
        self.env = env
        self.scheduler = scheduler
        self.executor = executor
        self.record = Record(scheduler.num_blocks)
        self.dead = False
        self._ready = ready
        self._resolved = resolved
        self._arrived: list[Request] = []
        self._wake = env.event()
        self._outside = False
        self._left: dict[int, int] = {}

    def submit(self, request: Request) -> None:
        """A request reaches the engine now; its client starts to wait."""
        life = self.record.arrive(request)
        self._left[request.id] = request.output_tokens
        self._arrived.append(request)
        if request.timeout is not None:
            patience = self.env.timeout(max(request.arrival + request.timeout - self.env.now, 0.0))
            patience.callbacks.append(lambda _: self._give_up(life))
        self._stir()

    def run(self) -> Process:
        """The engine's iterations, as a SimPy process."""
        in_flight: deque[_InFlight] = deque()
        watch = _CycleWatch(self.scheduler.fingerprint)
        gpu_free = 0.0
        yield _Moment(self.env, self._ready)
        while True:
            batch = self._schedule()
            if batch is None:
                return
            start = max(self.env.now, gpu_free)
            if batch.scheduled:
                gpu_free = self._launch(batch, start)
            in_flight.append(_InFlight(batch, gpu_free))
            if len(in_flight) < self.scheduler.pipeline_depth and batch.scheduled:
                continue
            oldest = in_flight.popleft()
            if oldest.batch.scheduled:
                yield _Moment(self.env, oldest.end)
            delivered = self._complete(oldest.batch)
            if self._outside or delivered:
                watch.progress()
                self._outside = False
                self.record.standstill = None
            working = bool(batch.scheduled or oldest.batch.scheduled or in_flight)
            if not working and not self._busy():
                yield from self._sleep()
            elif watch.repeats(working):
                self._stand_still(batch)
                yield from self._sleep()
            elif not working:
                self.record.idle_passes += 1
                yield _Moment(self.env, self.env.now + self.executor.idle())

    def _schedule(self) -> Batch | None:
        """Let the scheduler decide; None if that is the end of the engine."""
        for request in self._arrived:
            self.scheduler.add(request)
        self._arrived.clear()
        try:
            batch = self.scheduler.schedule()
        except Livelock as livelock:
            self._die(
                "livelock", f"livelock inside one schedule call: {livelock.why}", livelock.cycle
            )
            return None
        self.record.decided(batch, self.env.now)
        for i in batch.ignored:
            self._resolve(self.record.lives[i], Outcome.REJECTED, "the engine gave it up")
        for i in batch.lost:
            self._resolve(self.record.lives[i], Outcome.LOST, "it is in no queue any more")
        if batch.fatal:
            self._die("engine died", batch.fatal, [i for i, _ in batch.scheduled])
            return None
        return batch

    def _launch(self, batch: Batch, start: float) -> float:
        """Put a batch on the GPU at ``start``; returns when it will be done."""
        load = load_of(batch)
        end = start + self.executor.run(load)
        self.record.step(
            batch,
            load,
            start,
            end,
            waiting=len(self.scheduler.waiting_ids()),
            running=len(self.scheduler.running_ids()),
            free_blocks=self.scheduler.free_blocks,
        )
        return end

    def _complete(self, batch: Batch) -> bool:
        """Deliver the tokens of a batch that has run; returns whether there were any."""
        ended = {i for i in batch.emits if self._left[i] <= 1}
        completion = self.scheduler.complete(batch, ended)
        now = self.env.now
        for i in completion.delivered:
            self._left[i] -= 1
            life = self.record.lives[i]
            if life.outcome is Outcome.REJECTED:  # an engine may take up again what it gave up
                life.outcome, life.ended_at, life.reason = None, None, ""
            if life.outcome is None:
                life.tokens += 1
                life.last_token = now
                if life.first_token is None:
                    life.first_token = now
        for i in completion.finished:
            self._resolve(self.record.lives[i], Outcome.FINISHED)
        return bool(completion.delivered)

    def _give_up(self, life: Life) -> None:
        """The client's patience is over."""
        if life.outcome is None:
            self._resolve(life, Outcome.STARVED, "the client gave up")
            self.scheduler.abort(life.request.id)
            self._stir()

    def _resolve(self, life: Life, outcome: Outcome, reason: str = "") -> None:
        if life.outcome is None:
            life.outcome, life.reason, life.ended_at = outcome, reason, self.env.now
            if self._resolved:
                self._resolved()

    def _busy(self) -> bool:
        return bool(self.scheduler.waiting_ids() or self.scheduler.running_ids())

    def _stir(self) -> None:
        """Something came from outside: an engine that sleeps looks again."""
        self._outside = True
        if not self._wake.triggered:
            self._wake.succeed()

    def _sleep(self) -> Process:
        """Wait for something from outside, and for all else that happens at that time."""
        self._wake = self.env.event()
        yield self._wake
        yield _Moment(self.env, self.env.now)

    def _stand_still(self, batch: Batch) -> None:
        """The state repeats: without help from outside nothing will ever change."""
        if self.record.standstill is None:
            stuck = [*self.scheduler.running_ids(), *self.scheduler.waiting_ids()]
            kind = "livelock" if batch.scheduled else "deadlock"
            why = (
                "the same decisions repeat and no token is emitted"
                if batch.scheduled
                else "requests wait and the scheduler can run none of them"
            )
            self.record.standstill = Standstill(kind, self.env.now, why, sorted(set(stuck)))

    def _die(self, kind: str, why: str, requests: list[int]) -> None:
        self.dead = True
        self.record.standstill = Standstill(kind, self.env.now, why, sorted(set(requests)))


class _CycleWatch:
    """Notices that the scheduler's state repeats although nothing came in between.

    Keeps one earlier state and replaces it at powers of two (R. P. Brent, BIT 20, 1980), so a
    cycle of any length is found and a long stretch without a token costs little.
    """

    #: Steps without a token that are nothing unusual (chunks of a long prompt).
    PATIENCE = 64

    def __init__(self, state: Callable[[], Hashable]) -> None:
        self._state = state
        self._count = 0
        self._saved: Hashable = None

    def progress(self) -> None:
        """A token was delivered or something came from outside."""
        self._count = 0
        self._saved = None

    def repeats(self, working: bool) -> bool:
        """Whether the present state is one that was met before without progress since."""
        self._count += 1
        if working and self._count < self.PATIENCE:
            return False
        state = self._state()
        if state == self._saved:
            return True
        if self._saved is None or self._count & (self._count - 1) == 0:
            self._saved = state
        return False


def serve(engine: Engine, requests: Iterable[Request], horizon: float | None) -> Record:
    """Send ``requests`` to the engine at their arrivals and run until all is over.

    That is when nothing more can happen, or at ``horizon`` (s). Every request then has exactly
    one outcome.
    """
    env = engine.env
    ordered = sorted(requests, key=lambda request: request.arrival)

    def clients() -> Process:
        for request in ordered:
            if request.arrival > env.now:
                yield env.timeout(request.arrival - env.now)
            engine.submit(request)

    env.process(clients())
    env.process(engine.run())
    env.run(until=horizon)
    record = engine.record
    record.end = env.now
    for request in ordered:
        if request.id not in record.lives:  # the horizon came before it did
            record.arrive(request)
    _conclude(record, horizon)
    return record


def _conclude(record: Record, horizon: float | None) -> None:
    """Give the requests that nothing resolved their outcome.

    Where the engine had stopped for good before a client gave up, the stop is the cause.
    """
    stop = record.standstill
    for life in record.lives.values():
        waited_for_nothing = (
            stop is not None
            and life.outcome is Outcome.STARVED
            and life.ended_at is not None
            and life.ended_at >= stop.since
        )
        if waited_for_nothing or (stop and life.outcome is None):
            assert stop is not None
            life.outcome, life.reason = Outcome.STALLED, f"{stop.kind}: {stop.why}"
        elif life.outcome is None and horizon is not None:
            life.outcome, life.reason = Outcome.CUT_OFF, "the horizon came first"
        elif life.outcome is None:
            life.outcome, life.reason = Outcome.LOST, "the engine went idle without it"
        if life.ended_at is None:
            life.ended_at = record.end
