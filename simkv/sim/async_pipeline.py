"""A pipeline such as FastDeploy's: engine, worker and token processor as SimPy processes.

    engine ──tasks──▶ worker ──messages──▶ token processor
       ▲                                        │
       └───────────── shared memory ────────────┘

The engine's package has the three actors (``core/actor_protocol.py``); here they only get a clock.
Each is one process, each arrow one store. The engine decides on what the token processor has heard
so far, while tokens are still on their way; PaddlePaddle/FastDeploy PR #5796 is about that.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Iterator
from math import ceil
from typing import Any, NamedTuple, cast

import simpy

from simkv.core.actor_protocol import (
    Message,
    MessageEffects,
    Threads,
    WorkerCrash,
)
from simkv.core.outcome import Outcome
from simkv.core.request import Request
from simkv.core.scheduler_protocol import Batch, Scheduler
from simkv.costs.step_load import Executor
from simkv.scenario.thread_pacing import Pacing
from simkv.sim.clock import SimProcess
from simkv.sim.cycle_detection import CycleDetector
from simkv.sim.replica import Replica
from simkv.sim.run_record import EngineHalt, RunRecord
from simkv.sim.step_log import QueueState


class ReceivedTokens(NamedTuple):
    """Tokens that a client has, and when the first and the last came (s)."""

    tokens: int
    first: float
    last: float


class AsyncPipeline(Replica):
    """One replica whose three threads run side by side; used as an ``EngineField`` is.

    Every run ends. Where all three wait for each other, where they work but no client gets a
    token any more, or where the worker dies, ``record.engine_halt`` says so, and why.
    """

    def __init__(
        self,
        env: simpy.Environment,
        actors: Threads,
        executor: Executor,
        pacing: Pacing,
        ready: float = 0.0,
        resolved: Callable[[], None] | None = None,
        *,
        rank: int = 0,
    ) -> None:
        super().__init__(env, cast(Scheduler, actors), executor, ready, resolved, rank)
        self.actors = actors
        self.manager, self.worker, self.processor = actors.manager, actors.worker, actors.processor
        self.pacing = pacing
        self.tasks = simpy.Store(env, capacity=1)
        self.messages = simpy.Store(env)
        self._taken = env.event()
        self._new: list[Request] = []
        self._preempted: list[int] = []
        self._received: dict[int, ReceivedTokens] = {}
        self._useful: dict[int, int] = {}
        self._sent = self._heard = self._barren_steps = 0
        self._border = 0.0
        self._watch = CycleDetector(self._state)
        self._planned_at = self._decided = 0.0

    # The three threads.

    def run(self) -> SimProcess:
        """The engine thread; it starts the other two."""
        yield self.timeout_at(self.ready)
        self.env.process(self._work())
        self.env.process(self._listen())
        pacing, last_call = self.pacing, None
        planned: list[Any] = []
        while True:
            self._pull()
            this_call = self._heard, self.manager.fingerprint()
            # A call that changed nothing would change nothing again.
            in_vain = this_call == last_call and (not planned or self._at_rest())
            if in_vain or self.state_repeats():
                tasks_again = pacing.put_gap + pacing.queue_interval
                yield from self._await_news(tasks_again if planned else pacing.schedule_interval)
                continue
            last_call = this_call
            if planned := self.decide():
                yield self.env.timeout(pacing.put_gap)
                self._taken = self.env.event()
                yield self.tasks.put(self.put(planned))
                yield from self._poll(pacing.queue_interval, self._taken)
            else:
                yield self.timeout_at(self.env.now + pacing.schedule_interval)

    def _work(self) -> SimProcess:
        """The worker thread: at a step border take tasks, run a step, send its message."""
        while True:
            tasks: list[Any] = []
            if self.tasks.items or not self.worker.work():
                tasks = yield from self._take()
            if self.dead:
                return
            self.record.set_aside(self.actors.aside(), self.env.now)
            work, message = self.worker.work(), self.step()
            if message is None:
                continue
            self._sent += 1
            yield self.env.timeout(self._begin(work, tasks))
            self.env.process(self._carry(message))
            self._check_progress()
            self._border = self.env.now + self.pacing.step_gap
            yield self.timeout_at(self._border, 1)

    def _carry(self, message: Message) -> SimProcess:
        """The way of a message from the worker to the token processor."""
        yield self.env.timeout(self.pacing.token_processor_lag)
        yield self.messages.put(message)

    def _listen(self) -> SimProcess:
        """The token processor thread."""
        while True:
            message = yield self.messages.get()
            self._heard += 1
            self.hear(message)
            self.notify()

    def _take(self) -> Generator[simpy.Event, Any, list[Any]]:
        """The worker takes the tasks of one put, waiting for them if there are none."""
        parcel = yield self.tasks.get()
        self._taken.succeed()
        self._decided = self._planned_at
        try:
            self.worker.take(parcel)
        except WorkerCrash as crash:
            lost = [task.id for task in parcel.tasks if task.slot is None]
            self.die("engine died", f"raised: {crash}", lost)
        tasks: list[Any] = parcel.tasks
        return tasks

    def _await_news(self, interval: float) -> SimProcess:
        """Look every ``interval`` seconds whether anything is new; here, skip to when it is.

        Until then every call would decide what the last one did, and change as little.
        """
        if self._at_rest():
            why = "; ".join(self._hung_slots())
            self._stop("deadlock", why or "requests wait and the scheduler can run none of them")
        yield from self._poll(interval, self.sleep())

    def _poll(self, interval: float, event: simpy.Event) -> SimProcess:
        """Sleep ``interval`` seconds, once at least and then until ``event`` has happened."""
        start = self.env.now
        yield event
        naps = max(1, ceil((self.env.now - start) / interval))
        yield self.timeout_at(start + naps * interval)

    # What they do, for whoever wants to watch.

    def decide(self) -> list[Any]:
        """One ``schedule`` call."""
        manager, now = self.manager, self.env.now
        planned = manager.schedule()
        self.changed = True
        decision = Batch(preempted=manager.preempted, causes=manager.causes, held=manager.held())
        self.record.decided(decision, now)
        self._preempted += manager.preempted
        self.record.end = now
        if planned:
            self._planned_at = now
        return planned

    def put(self, planned: list[Any]) -> Any:
        """Serialise the tasks of a decision."""
        self.changed = True
        return self.manager.put(planned)

    def step(self) -> Message | None:
        """What the worker's step will say when it is over; None if there is nothing to run."""
        lives = self.record.requests
        return self.worker.step(lambda i, k: k >= lives[i].request.output_tokens)

    def hear(self, message: Message) -> MessageEffects:
        """A message takes effect; clients get their tokens."""
        heard = self.processor.receive(message)
        self.changed = True
        for i in heard.delivered:
            self._deliver(i)
        if self.delivered:
            self.delivered(heard.delivered)
        for i in heard.finished:
            self.resolve(self.record.requests[i], Outcome.FINISHED)
        return heard

    # The record of it.

    def _pull(self) -> None:
        """Take new requests. That a client went away is not heeded, as in
        ``FastDeployScheduler.abort``."""
        arrived = [message for message in self.inbox if isinstance(message, Request)]
        self.inbox.clear()
        self.changed = True
        self._new += arrived
        if arrived and not self.dead:
            self.record.engine_halt = None
            self._watch.progress()
        count = len(self._new)
        if self.pacing.max_prefill_num is not None:
            seats = 0 if self.manager.waiting else self.manager.slots.count(None)
            count = min(seats, self.pacing.max_prefill_num)
        for request in self._new[:count]:
            self.manager.add(request)
            self.record.requests[request.id].seen = self.env.now
        del self._new[:count]

    def _begin(self, work: list[Any], tasks: list[Any]) -> float:
        """Note a step that begins now; returns its seconds."""
        if not work:  # only an acknowledgement
            self.record.idle_passes += 1
            return self.executor.idle()
        prefills = sum(task.kind == "prefill" for task in tasks)
        batch = self.actors.batch_of(work, prefills, self._preempted)
        self._preempted = []
        load = self.load(batch)
        seconds = self.executor.run(load)
        engine = self.scheduler
        queues = QueueState(engine.num_waiting, engine.num_running, engine.free_blocks)
        now = self.env.now
        self.record.step(batch, load, now, now + seconds, queues, self._decided)
        return seconds

    def _deliver(self, i: int) -> None:
        """A token of request ``i`` reaches its client, if that is still there."""
        life, now = self.record.requests[i], self.env.now
        self._useful[i] = self._useful.get(i, 0) + 1
        if self._useful[i] <= life.request.output_tokens:  # not one that was generated twice
            self._barren_steps = 0
            self._watch.progress()
        if life.outcome is None:
            before = self._received.get(i, ReceivedTokens(0, now, now))
            self._received[i] = ReceivedTokens(before.tokens + 1, before.first, now)

    def finalize(self) -> None:
        """The run ends now. Clients have what was heard, not what the GPU has emitted."""
        self.record.close(-1)
        for i, life in self.record.requests.items():
            life.tokens, life.first_token, life.last_token = self._received.get(i, (0, None, None))

    def run_notes(self) -> list[str]:
        return pipeline_notes(self.record)

    # Why it comes to a stop.

    def _at_rest(self) -> bool:
        """Whether nothing happens unless the engine puts tasks: no step, no message, no tasks."""
        idle = not self.tasks.items and not self.worker.work()
        return idle and self._sent == self._heard

    def _state(self) -> Hashable:
        """All that decides what comes next, when all but the engine are at rest."""
        to_border = round(max(self._border - self.env.now, 0.0), 9)
        return self.manager.fingerprint(), self.worker.fingerprint(), to_border

    def state_repeats(self) -> bool:
        """Whether all was as it is now once before, and no client got a token since."""
        if not self._at_rest() or not self._watch.repeats(working=False, now=self.env.now):
            return False
        self._stop("livelock", "the same decisions repeat and no token is emitted")
        return True

    def _check_progress(self) -> None:
        """Give up as well when all tokens could have been computed one by one without a circle."""
        self._barren_steps += 1
        alive = self.manager.alive()
        if self._barren_steps > 1000 + sum(seq.total for seq in alive):
            why = f"no client got a token in the last {self._barren_steps} steps"
            self.die("livelock", why, [seq.id for seq in alive])

    def _stop(self, kind: str, why: str) -> None:
        """Nothing will change any more unless something comes from outside."""
        stuck = {seq.id for seq in self.manager.alive()} | {request.id for request in self._new}
        if stuck and self.record.engine_halt is None:
            held = dict(self.scheduler.blocks_held())
            since = self._watch.since if kind == "livelock" else None
            self.record.engine_halt = EngineHalt(
                kind, self.record.end, why, sorted(stuck), held, since
            )

    def _hung_slots(self) -> Iterator[str]:
        """What engine and worker expect of each other, slot by slot, now that all is quiet."""
        for i, seq in enumerate(self.manager.slots):
            slot = self.worker.slots.get(i)
            if seq is None:
                continue
            if seq.id in self.manager.pending:
                yield f"slot {i}: no message will acknowledge the preemption of request {seq.id}"
            elif slot and slot.id == seq.id and seq.decoding:
                yield f"slot {i}: {_disagreement(seq, slot)}"


def _disagreement(seq: Any, slot: Any) -> str:
    """Why a request does not go on that ``seq``, the engine's view of it, believes to decode."""
    if slot.state == "chunk stopped":
        tokens = "one token" if slot.length == slot.end + 1 else f"{slot.length - slot.end} tokens"
        return (
            f"the worker waits for a chunk, the scheduler believes that request {seq.id} decodes; "
            f"they disagree by {tokens} ({slot.end} vs {slot.length})"
        )
    if slot.state == "idle":
        return f"the worker has ended request {seq.id}, the scheduler waits for its next token"
    return f"request {seq.id} lacks the block for its next token and gets none"


def pipeline_notes(record: RunRecord) -> list[str]:
    """What a reader of a run must know: clients with wrong tokens, slots that hung to the end."""
    found = [
        f"request {i} was given {life.tokens} tokens where the model emits {n}: tokens on their "
        "way were generated again, or went to whoever had the slot by then"
        for i, life in record.requests.items()
        if life.outcome is Outcome.FINISHED and life.tokens != (n := life.request.output_tokens)
    ]
    if record.engine_halt and not any(
        x.outcome is Outcome.STALLED for x in record.requests.values()
    ):
        found.append(f"from {record.engine_halt.since:.3f} s on: {record.engine_halt.why}")
    return found
