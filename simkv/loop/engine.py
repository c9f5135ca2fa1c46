"""The loop: arrivals, schedule calls, steps, token delivery and client timeouts in SimPy time."""

from __future__ import annotations

import gc
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any, Literal, NamedTuple, Protocol

import simpy

from simkv.core.outcome import Outcome
from simkv.core.request import Request
from simkv.core.scheduler import Batch, Completion, Livelock, Scheduler
from simkv.costs.load import Executor, Load, load_of
from simkv.loop.clock import Moment, passed
from simkv.loop.record import Life, Queues, Record, Standstill
from simkv.workload.clients import Clients

Process = Generator[simpy.Event, Any, None]

#: How an iteration goes on: with the next at once, after an idle pass, or when something comes.
Turn = Literal["on", "idle", "sleep"]

#: A leap is not planned further ahead than this many steps.
FARTHEST = 512


class InFlight(NamedTuple):
    """A batch on the GPU: its row in the step log, when it is done, and whose last token it has
    among the requests that it lists."""

    batch: Batch
    row: int
    end: float
    last_of: frozenset[int]


@dataclass(slots=True)
class Leap:
    """A stretch of like steps under way.

    ``load`` is that of the step just launched, ``ends`` are the ends of those that follow it. At
    ``moments`` one iteration of the loop would be over and the next begin.
    """

    load: Load
    ends: list[float]
    moments: list[float]
    wake: Moment


class Engine:
    """One replica: a scheduler, an executor and the record of what they did.

    Start ``run()`` as a SimPy process and hand requests to ``submit``. A batch of a pipelined
    scheduler (``pipeline_depth`` 2) is decided while its predecessor runs. Requests that come
    before ``ready`` (s) wait until then. ``resolved`` is called whenever a request has ended, and
    ``ended`` is told how. Of several engines in one world those of a lower ``rank`` go first at one
    time.

    With ``leaping``, a stretch of steps in which nothing but decoding would happen is one event.
    What comes from outside in the meantime ends the stretch with the step that it falls into, so
    leaping changes nothing but the work.
    """

    def __init__(
        self,
        env: simpy.Environment,
        scheduler: Scheduler,
        executor: Executor,
        ready: float = 0.0,
        resolved: Callable[[], None] | None = None,
        *,
        leaping: bool = True,
        rank: int = 0,
    ) -> None:
        self.env = env
        self.rank = rank
        self.scheduler = scheduler
        self.executor = executor
        self.record = Record(scheduler.num_blocks)
        self.leaping = leaping
        self._spread: bool = getattr(executor, "wants_spread", False)
        self.leaps = 0
        self.dead = False
        self.halted = False
        self._ready = ready
        self._resolved = resolved
        self.ended: Callable[[Life], None] | None = None
        #: Called when the engine has died.
        self.died: Callable[[], None] | None = None
        #: Told what KV a schedule call wants to have from elsewhere.
        self.loads: Callable[[list[tuple[int, int]]], None] | None = None
        self._inbox: list[Request | int | Callable[[], None]] = []
        self._outside = False
        self._wake: simpy.Event | None = None
        self._leap: Leap | None = None
        self._watch = _CycleWatch(scheduler.fingerprint)
        self._in_flight: deque[InFlight] = deque()
        self._group_row = self._completed_row = -1
        # Tokens of each request that no step has been asked for yet, and the rows of the step log
        # in which members of the decode group will get their last one.
        self._left: dict[int, int] = {}
        self._finishes: list[tuple[int, int, int]] = []
        self._ending: dict[int, list[int]] = {}

    def submit(self, request: Request) -> None:
        """A request reaches the engine now; its client starts to wait."""
        life = self.record.arrive(request)
        self._left[request.id] = request.output_tokens
        self._inbox.append(request)
        if request.timeout is not None:
            patience = self.env.timeout(max(request.arrival + request.timeout - self.env.now, 0.0))
            patience.callbacks.append(lambda _: self._give_up(life))
        self._stir()

    def tell(self, message: Callable[[], None]) -> None:
        """Something from outside takes effect before the next decision."""
        self._inbox.append(message)
        self._stir()

    def run(self) -> Process:
        """The engine's work until it is over or halted, as a SimPy process."""
        for event in self._iterate():
            yield event
            if self.halted:
                return

    def _iterate(self) -> Process:
        """The engine's iterations."""
        in_flight = self._in_flight
        gpu_free = 0.0
        yield self._moment(self._ready)
        while True:
            batch = self._schedule()
            if batch is None:
                return
            load, newest = self._launch(batch, max(self.env.now, gpu_free))
            gpu_free = max(gpu_free, newest.end)
            in_flight.append(newest)
            if len(in_flight) < self.scheduler.pipeline_depth and batch:
                continue
            if in_flight[0].batch:
                if leap := self._plan_leap(batch, load):
                    yield leap.wake
                    self._land(leap, len(leap.moments) - 1)
                    gpu_free = in_flight[-1].end
                else:
                    yield self._moment(in_flight[0].end)
            turn = self._end_turn(batch, in_flight.popleft())
            if turn == "sleep":
                yield from self._sleep()
            elif turn == "idle":
                yield self._moment(self.env.now + self.executor.idle())

    def _end_turn(self, batch: Batch, oldest: InFlight) -> Turn:
        """The ``oldest`` batch has run, and ``batch`` was the last to be decided: what now."""
        delivered = self._complete(oldest)
        if self._outside or delivered:
            self._watch.progress()
            self._outside = False
        if delivered:  # what came from outside may have changed nothing
            self.record.standstill = None
        working = bool(batch or oldest.batch) or any(f.batch for f in self._in_flight)
        if not working and (not self._busy() or getattr(self.scheduler, "awaits_kv", False)):
            return "sleep"
        if self._watch.repeats(working, self.env.now):
            self._stand_still(self._watch.since)
            return "sleep"
        if not working:
            self.record.idle_passes += 1
            return "idle"
        return "on"

    def _schedule(self) -> Batch | None:
        """Let the scheduler decide; None if that is the end of the engine."""
        self.record.end = self.env.now
        for message in self._inbox:
            if isinstance(message, Request):
                self.scheduler.add(message)
                self.record.lives[message.id].seen = self.env.now
            elif isinstance(message, int):
                self.scheduler.abort(message)
            else:
                message()
        self._inbox.clear()
        try:
            batch = self.scheduler.schedule()
        except Livelock as livelock:
            why = f"livelock inside one schedule call: {livelock.why}"
            self._die("livelock", why, livelock.cycle)
            return None
        self._note_departures(batch)
        self.record.decided(batch, self.env.now)
        self.record.set_aside(batch.aside, self.env.now)
        for i in batch.ignored:
            self.resolve(self.record.lives[i], Outcome.REJECTED, "the engine gave it up")
        for i in batch.lost:
            self.resolve(self.record.lives[i], Outcome.LOST, "it is in no queue any more")
        if batch.loads and self.loads:
            self.loads(batch.loads)
        if batch.fatal:
            self._die("engine died", batch.fatal, [i for i, _ in batch.scheduled])
            return None
        return batch

    def _launch(
        self, batch: Batch, start: float, seconds: float | None = None
    ) -> tuple[Load, InFlight]:
        """Put a batch on the GPU at ``start``, behind those that are there.

        It takes as long as the executor says, or ``seconds`` if they are given.
        """
        load = load_of(batch, spread=self._spread)
        if not batch:
            return load, InFlight(batch, -1, self.env.now, frozenset())
        end = start + (self.executor.run(load) if seconds is None else seconds)
        scheduler = self.scheduler
        queues = Queues(scheduler.num_waiting, scheduler.num_running, scheduler.free_blocks)
        row = self.record.step(batch, load, start, end, queues, self.env.now)
        if batch.decodes:
            self._group_row = row
        for i in batch.joined:
            heappush(self._finishes, (row + self._left[i] - 1, i, row))
        last_of = []
        for i in batch.emits:
            self._left[i] -= 1
            if self._left[i] == 0:
                last_of.append(i)
        return load, InFlight(batch, row, end, frozenset(last_of))

    def _note_departures(self, batch: Batch) -> None:
        """Requests that the decode group has lost since the batch before."""
        for i in batch.left:
            since = self.record.decoding_since(i)
            if since is None:
                continue
            last_token = since + self._left[i] - 1
            self._left[i] -= self.record.leave(i, self._group_row)
            if self._completed_row < last_token <= self._group_row:
                self._ending.setdefault(last_token, []).append(i)

    def _complete(self, flight: InFlight) -> bool:
        """Deliver the tokens of a batch that has run; returns whether there were any."""
        batch, row = flight.batch, flight.row
        self._completed_row = max(self._completed_row, row)
        ended = set(flight.last_of)
        if batch.decodes:
            ended.update(self._ending.pop(row, ()))
            while self._next_finish() <= row:
                ended.add(heappop(self._finishes)[1])
        completion = self.scheduler.complete(batch, ended)
        if len(completion.delivered) != len(batch.emits):
            self._note_dropped(batch, completion, row)
        lives = self.record.lives
        for i in completion.delivered:
            if lives[i].outcome is Outcome.REJECTED:  # some engines take up what they gave up
                lives[i].outcome, lives[i].ended_at, lives[i].reason = None, None, ""
        for i in completion.finished:
            self.resolve(lives[i], Outcome.FINISHED)
        return bool(completion.delivered or batch.decodes)

    def _note_dropped(self, batch: Batch, completion: Completion, row: int) -> None:
        """Tokens that were computed and thrown away have to be computed again, if ever."""
        for i in set(batch.emits) - set(completion.delivered):
            self._left[i] += 1
            self.record.lives[i].dropped.append(row)

    def _next_finish(self) -> float:
        """Row of the step log in which a member of the decode group gets its last token next."""
        while self._finishes:
            row, i, since = self._finishes[0]
            if self.record.decoding_since(i) == since:
                return row
            heappop(self._finishes)
        return float("inf")

    def _plan_leap(self, batch: Batch, load: Load) -> Leap | None:
        """The stretch of steps like the one just launched, if it is one of decodes only."""
        oldest, newest = self._in_flight[0], self._in_flight[-1]
        if not self.leaping or batch.kind != "decode" or not _alike(oldest, newest):
            return None
        most = min(self._next_finish() - oldest.row, FARTHEST)
        if oldest.last_of or oldest.row in self._ending:
            most = 0
        for i in batch.emits:
            most = min(most, self._left[i] + newest.row - oldest.row)
        if most < 1:
            return None
        steps = self.scheduler.leap(int(most) + 1) - 1
        ends, end = [], newest.end
        for seconds in self.executor.foresee(load, steps):
            end += seconds
            ends.append(end)
        if not ends:
            return None
        moments = [oldest.end, *ends] if oldest is newest else [oldest.end, newest.end, *ends[:-1]]
        self._leap = Leap(load, ends, moments, self._moment(moments[-1]))
        return self._leap

    def _land(self, leap: Leap, done: int) -> None:
        """Bring everything to where stepping would be after ``done`` more steps."""
        oldest, newest = self._in_flight[0], self._in_flight[-1]
        self._leap = None
        if not done:
            return
        self.leaps += 1
        batch, ends = newest.batch, leap.ends[:done]
        self.record.repeat(batch, leap.moments[:done], ends, self.scheduler.skip(done))
        starts = [newest.end, *ends[:-1]]
        self.executor.ran(leap.load, [b - a for a, b in zip(starts, ends, strict=True)])
        if batch.decodes:
            self._group_row = newest.row + done
        lasts: dict[int, list[int]] = {}
        for i in batch.emits:
            lasts.setdefault(newest.row + self._left[i], []).append(i)
            self._left[i] -= done
        rows = [(newest.row + done, ends[-1])]
        if oldest is not newest:
            rows.insert(0, (oldest.row + done, leap.moments[done]))
        self._in_flight.clear()
        for row, end in rows:
            self._in_flight.append(InFlight(batch, row, end, frozenset(lasts.get(row, ()))))

    @property
    def num_waiting(self) -> int:
        """Requests that wait now, those that the scheduler has not been told of included."""
        new = sum(isinstance(message, Request) for message in self._inbox) if self._inbox else 0
        return self.scheduler.num_waiting + new

    @property
    def num_running(self) -> int:
        """Requests that run now; a leap does not change it while it is under way."""
        return self.scheduler.num_running

    @property
    def free_blocks(self) -> int:
        """Blocks that can be had now, as stepping would have left them."""
        self._catch_up()
        return self.scheduler.free_blocks

    def _catch_up(self) -> None:
        """Bring a leap under way to where stepping would be now; it goes on from there."""
        leap = self._leap
        if leap is None or not (done := self._over(leap)):
            return
        self._land(leap, done)
        load = leap.load
        context = load.decode_context + done * load.decode_seqs
        leap.load = load._replace(decode_context=context)
        del leap.ends[:done], leap.moments[:done]
        self._leap = leap

    def halt(self) -> list[Life]:
        """Stop for good now, in the middle of a step; returns the requests that have not ended."""
        if self._leap is not None:
            self._land(self._leap, self._over(self._leap))
        self.halted = True
        self.record.end = self.env.now
        return [life for life in self.record.lives.values() if life.outcome is None]

    def conclude(self, requests: Iterable[Request], horizon: float | None) -> Record:
        """The run is over: every one of ``requests`` gets its outcome, and the record is closed."""
        record = self.record
        if horizon is not None:
            record.end = horizon
        for request in requests:
            if request.id not in record.lives:
                cut_off(record, request)
        give_outcomes(record, horizon)
        self.settle()
        return record

    def settle(self) -> None:
        """The run ends now: a leap under way gets as far as stepping would have got."""
        if self._leap is not None:
            self._land(self._leap, self._over(self._leap))
        self.record.close(self._group_row)

    def _give_up(self, life: Life) -> None:
        """The client's patience is over."""
        if life.outcome is None:
            self.resolve(life, Outcome.STARVED, "the client gave up")
            self._inbox.append(life.request.id)
            self._stir()

    def resolve(self, life: Life, outcome: Outcome, reason: str = "") -> None:
        """A request has ended now, unless it had before."""
        if life.outcome is None:
            life.outcome, life.reason, life.ended_at = outcome, reason, self.env.now
            if self._resolved:
                self._resolved()
            if self.ended:
                self.ended(life)

    def _busy(self) -> bool:
        return bool(self.scheduler.num_waiting or self.scheduler.num_running)

    def _stir(self) -> None:
        """Something came from outside: the engine looks again when its present step is over."""
        self._outside = True
        self.record.end = self.env.now
        if self._leap is not None:
            moments = self._leap.moments
            index = self._over(self._leap)
            if index < len(moments) - 1:
                del moments[index + 1 :]
                self._leap.wake = self._leap.wake.move(moments[-1])
        elif self._wake is not None:
            self._wake.succeed()
            self._wake = None

    def _over(self, leap: Leap) -> int:
        """How many of the leap's iterations would be over by now.

        One that is over just now counts if what is happening follows from an engine of higher rank.
        """
        moments, now = leap.moments, self.env.now
        if passed(self.env) > self.rank:
            return bisect_right(moments, now)
        return bisect_left(moments, now)

    def _sleep(self) -> Process:
        """Wait for something from outside, and for all else that happens at that time."""
        self._wake = self.env.event()
        yield self._wake
        yield self._moment(self.env.now)

    def _moment(self, time: float, after: int = 0) -> Moment:
        """A point in time of this engine: after what comes from outside, in the order of ranks."""
        return Moment(self.env, time, self.rank + after)

    def _stand_still(self, since: float) -> None:
        """The state of ``since`` repeats: without help from outside nothing will ever change."""
        if self.record.standstill is None:
            stuck = [*self.scheduler.running_ids(), *self.scheduler.waiting_ids()]
            decided = self.record.steps.decided
            kind, why = "deadlock", "requests wait and the scheduler can run none of them"
            if decided and decided[-1] >= since:
                kind, why = "livelock", "the same decisions repeat and no token is emitted"
            held = dict(self.scheduler.blocks_held())
            self.record.standstill = Standstill(
                kind, self.env.now, why, sorted(set(stuck)), held, since
            )

    def _die(self, kind: str, why: str, requests: list[int]) -> None:
        self.dead = True
        held = dict(self.scheduler.blocks_held())
        self.record.standstill = Standstill(kind, self.env.now, why, sorted(set(requests)), held)
        if self.died:
            self.died()


def _alike(oldest: InFlight, newest: InFlight) -> bool:
    """Whether the batches in flight are the same decision made again."""
    a, b = oldest.batch, newest.batch
    if a is b:
        return True
    same_group = a.decodes == b.decodes and not b.joined and not b.left
    return a.kind == b.kind and same_group and a.scheduled == b.scheduled


class _CycleWatch:
    """Notices that the scheduler's state repeats although nothing came in between.

    Keeps one earlier state and replaces it at powers of two (R. P. Brent, BIT 20, 1980), so a
    cycle of any length is found and a long stretch without a token costs little. ``since`` is when
    it was taken (s).
    """

    #: Steps without a token that are nothing unusual (chunks of a long prompt).
    PATIENCE = 64

    def __init__(self, state: Callable[[], Hashable]) -> None:
        self._state = state
        self._count = 0
        self._saved: Hashable = None
        self.since = 0.0

    def progress(self) -> None:
        """A token was delivered or something came from outside."""
        self._count = 0
        self._saved = None

    def repeats(self, working: bool, now: float) -> bool:
        """Whether the present state is one that was met before without progress since."""
        self._count += 1
        if working and self._count < self.PATIENCE:
            return False
        state = self._state()
        if state == self._saved:
            return True
        if self._saved is None or self._count & (self._count - 1) == 0:
            self._saved, self.since = state, now
        return False


@contextmanager
def _long_lived() -> Iterator[None]:
    """Spare the collector of cycles a record that only grows; there are none to collect."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class Server(Protocol):
    """What serves requests: an engine, or a fleet of them."""

    env: simpy.Environment
    ended: Callable[[Life], None] | None

    def submit(self, request: Request) -> None:
        """A request comes now."""

    def run(self) -> Process:
        """Its work, as a SimPy process."""

    def conclude(self, requests: Iterable[Request], horizon: float | None) -> Record:
        """The run is over: every one of ``requests`` gets its outcome, and the record is closed."""


def serve(engine: Server, sent: Iterable[Request] | Clients, horizon: float | None) -> Record:
    """Send requests to the engine and run until all is over; every request has one outcome then.

    ``sent`` are requests that come at their arrivals, or clients that wait for answers. All is over
    when nothing more can happen, or at ``horizon`` (s).
    """
    env = engine.env
    clients = sent if isinstance(sent, Clients) else Clients(list(sent))
    env.process(_arrive(engine, clients.requests) if clients.open else _converse(engine, clients))
    env.process(engine.run())
    with _long_lived():
        env.run(until=horizon)
        return engine.conclude(clients.requests, horizon)


def cut_off(record: Record, request: Request) -> None:
    """Enter a request that never came."""
    life = record.arrive(request)
    life.outcome, life.reason = Outcome.CUT_OFF, "its turn did not come"
    life.ended_at = request.arrival


def _arrive(engine: Server, requests: Iterable[Request]) -> Process:
    """Requests come at their arrivals, whatever becomes of the others."""
    env = engine.env
    for request in sorted(requests, key=lambda request: request.arrival):
        if request.arrival > env.now:
            yield env.timeout(request.arrival - env.now)
        engine.submit(request)


def _converse(engine: Server, clients: Clients) -> Process:
    """Clients send when they have the answer that they wait for, and when they may."""
    env = engine.env
    answered = env.event()

    def ended(life: Life) -> None:
        clients.ended(life.request.id, env.now, life.outcome is Outcome.FINISHED)
        if not answered.triggered:
            answered.succeed()

    engine.ended = ended
    while True:
        for request in clients.send(env.now):
            engine.submit(request)
        following = clients.next_time()
        answered = env.event()
        due = [] if following is None else [env.timeout(max(following - env.now, 0.0))]
        yield env.any_of([answered, *due])


def give_outcomes(record: Record, horizon: float | None) -> None:
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
