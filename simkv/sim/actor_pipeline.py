"""A pipeline such as FastDeploy's: engine, worker and token processor as SimPy processes.

    engine ──tasks──▶ worker ──messages──▶ token processor
      ▲                                        │
      └───────────── shared memory ────────────┘

The engine's package implements the three actors (``core/actor_protocol.py``); this module adds the
timing. Each actor is a SimPy process; ``tasks`` and ``messages`` are SimPy stores. When the engine
makes a scheduling decision, it knows only the tokens that the token processor has received so far;
other tokens are still in transit (see PaddlePaddle/FastDeploy PR #5796).
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
from simkv.sim.replica_base import Replica
from simkv.sim.run_record import EngineHalt, RunRecord
from simkv.sim.step_log import QueueState


class ReceivedTokens(NamedTuple):
    """Number of tokens that a client has received.

    ``first`` and ``last`` are the times (s) of the first and the last token.
    """

    tokens: int
    first: float
    last: float


class AsyncPipeline(Replica):
    """Replica whose engine, worker and token processor run concurrently.

    If the replica halts before all requests have ended, ``record.engine_halt`` contains the reason.
    """

    # The reasons: the three actors wait for each other (deadlock), the actors work but no client
    # receives another token (livelock), or the worker died.

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
        self._sent = self._received_messages = self._steps_without_token = 0
        self._border = 0.0
        self._watch = CycleDetector(self._state)
        self._planned_at = self._decided = 0.0

    # The three actors.

    def run(self) -> SimProcess:
        """SimPy process of the engine. It also starts the worker and the token processor."""
        yield self.timeout_at(self.ready)
        self.env.process(self._work())
        self.env.process(self._listen())
        pacing, last_call = self.pacing, None
        planned: list[Any] = []
        while True:
            self._pull()
            this_call = self._received_messages, self.manager.fingerprint()
            # A call that changed nothing would change nothing if repeated.
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
        """SimPy process of the worker: take tasks, run steps and send messages."""
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
        """SimPy process: deliver ``message`` from the worker to the token processor."""
        yield self.env.timeout(self.pacing.token_processor_lag)
        yield self.messages.put(message)

    def _listen(self) -> SimProcess:
        """SimPy process of the token processor: process each message that arrives."""
        while True:
            message = yield self.messages.get()
            self._received_messages += 1
            self.receive(message)
            self.notify()

    def _take(self) -> Generator[simpy.Event, Any, list[Any]]:
        """Wait for tasks, pass them to the worker and return them."""
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
        """Sleep until the first poll after an external event.

        Polls are ``interval`` seconds apart.
        """
        # Polls before the event are not simulated, because they would only repeat the last
        # decision.
        if self._at_rest():
            why = "; ".join(self._hung_slots())
            self._stop("deadlock", why or "requests wait, but the scheduler can run none of them")
        yield from self._poll(interval, self.sleep())

    def _poll(self, interval: float, event: simpy.Event) -> SimProcess:
        """Sleep until the first poll after ``event``. Polls are ``interval`` seconds apart."""
        start = self.env.now
        yield event
        naps = max(1, ceil((self.env.now - start) / interval))
        yield self.timeout_at(start + naps * interval)

    # Operations of the three actors, also for tests and recorders.

    def decide(self) -> list[Any]:
        """Make and record a scheduling decision. Return the planned tasks."""
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
        """Serialize the tasks of a decision for the worker."""
        self.changed = True
        return self.manager.put(planned)

    def step(self) -> Message | None:
        """Run the next step of the worker and return its message, or None if there is no work."""
        lives = self.record.requests
        return self.worker.step(lambda i, k: k >= lives[i].request.output_tokens)

    def receive(self, message: Message) -> MessageEffects:
        """Process a message: deliver its tokens, and record the requests that finish."""
        heard = self.processor.receive(message)
        self.changed = True
        for i in heard.delivered:
            self._deliver(i)
        if self.on_tokens:
            self.on_tokens(heard.delivered)
        for i in heard.finished:
            self.resolve(self.record.requests[i], Outcome.FINISHED)
        return heard

    # Recording.

    def _pull(self) -> None:
        """Pass new requests to the engine, up to its limit of prefills."""
        # Disconnected clients are ignored, as in ``FastDeployScheduler.abort``.
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
            self.record.requests[request.id].received_at = self.env.now
        del self._new[:count]

    def _begin(self, work: list[Any], tasks: list[Any]) -> float:
        """Record that the worker begins a step now. Return the duration of the step (s)."""
        if not work:  # the message is only an acknowledgement
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
        """Deliver a token of request ``i`` to its client, if the client is connected."""
        life, now = self.record.requests[i], self.env.now
        self._useful[i] = self._useful.get(i, 0) + 1
        # a token that was generated twice is not counted again
        if self._useful[i] <= life.request.output_tokens:
            self._steps_without_token = 0
            self._watch.progress()
        if life.outcome is None:
            before = self._received.get(i, ReceivedTokens(0, now, now))
            self._received[i] = ReceivedTokens(before.tokens + 1, before.first, now)

    def finalize(self) -> None:
        """Close the record at the end of the run."""
        # A token counts as delivered when the token processor has received it, which is later than
        # the end of its step on the GPU.
        self.record.close(-1)
        for i, life in self.record.requests.items():
            life.tokens, life.first_token, life.last_token = self._received.get(i, (0, None, None))

    def run_notes(self) -> list[str]:
        return pipeline_notes(self.record)

    # Detection of halts.

    def _at_rest(self) -> bool:
        """Whether no step, message or task is in progress."""
        idle = not self.tasks.items and not self.worker.work()
        return idle and self._sent == self._received_messages

    def _state(self) -> Hashable:
        """Return the state that determines the rest of the run while only the engine can act."""
        to_border = round(max(self._border - self.env.now, 0.0), 9)
        return self.manager.fingerprint(), self.worker.fingerprint(), to_border

    def state_repeats(self) -> bool:
        """Return whether an earlier state occurs again without a new token for any client.

        If so, a livelock is recorded.
        """
        if not self._at_rest() or not self._watch.repeats(working=False, now=self.env.now):
            return False
        self._stop("livelock", "the same decisions repeat without emitting a token")
        return True

    def _check_progress(self) -> None:
        """Halt with a livelock if no client has received a token in too many steps."""
        # The limit is 1000 steps plus one step per token of the unfinished requests.
        self._steps_without_token += 1
        alive = self.manager.alive()
        if self._steps_without_token > 1000 + sum(seq.total for seq in alive):
            why = f"no client received a token in the last {self._steps_without_token} steps"
            self.die("livelock", why, [seq.id for seq in alive])

    def _stop(self, kind: str, why: str) -> None:
        """Record that the engine has halted. Only an external event can resume it."""
        stuck = {seq.id for seq in self.manager.alive()} | {request.id for request in self._new}
        if stuck and self.record.engine_halt is None:
            held = dict(self.scheduler.blocks_held())
            since = self._watch.since if kind == "livelock" else None
            self.record.engine_halt = EngineHalt(
                kind, self.record.end, why, sorted(stuck), held, since
            )

    def _hung_slots(self) -> Iterator[str]:
        """Yield a reason for each slot in which engine and worker wait for each other."""
        for i, seq in enumerate(self.manager.slots):
            slot = self.worker.slots.get(i)
            if seq is None:
                continue
            if seq.id in self.manager.pending:
                yield f"slot {i}: no message will acknowledge the preemption of request {seq.id}"
            elif slot and slot.id == seq.id and seq.decoding:
                yield f"slot {i}: {_disagreement(seq, slot)}"


def _disagreement(seq: Any, slot: Any) -> str:
    """Return why a request makes no progress although the engine expects it to decode."""
    if slot.state == "chunk stopped":
        tokens = "one token" if slot.length == slot.end + 1 else f"{slot.length - slot.end} tokens"
        return (
            f"the worker waits for a prefill chunk, but the scheduler treats request {seq.id} as "
            f"decoding; they differ by {tokens} ({slot.end} vs {slot.length})"
        )
    if slot.state == "idle":
        return f"the worker has ended request {seq.id}, but the scheduler waits for its next token"
    return f"request {seq.id} has no block for its next token, and none is allocated"


def pipeline_notes(record: RunRecord) -> list[str]:
    """Return a note for each client that received a wrong number of tokens."""
    # Another note reports a halt that affected no request.
    found = [
        f"request {i} received {life.tokens} tokens, but the model emits {n}: tokens in transit "
        "were generated again or were delivered to the next request in the slot"
        for i, life in record.requests.items()
        if life.outcome is Outcome.FINISHED and life.tokens != (n := life.request.output_tokens)
    ]
    if record.engine_halt and not any(
        x.outcome is Outcome.STALLED for x in record.requests.values()
    ):
        found.append(f"since {record.engine_halt.since:.3f} s: {record.engine_halt.why}")
    return found
