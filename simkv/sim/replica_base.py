# mypyc: compile
"""The interface of a replica towards clients and routers, independent of the engine loop."""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import simpy
from mypy_extensions import mypyc_attr

from simkv.core.engine_spec import AdmissionCheck, EngineConfig
from simkv.core.outcome import Outcome
from simkv.core.request import Request
from simkv.core.scheduler_protocol import (
    Batch,
    KvCopies,
    Refusal,
    Scheduler,
)
from simkv.costs.step_load import (
    Executor,
    StepLoad,
    compute_step_load,
    wants_spread,
)
from simkv.schedulers.engine_registry import find_engine_spec
from simkv.sim.clock import ExactTimeout, SimProcess
from simkv.sim.run_record import EngineHalt, RequestRecord, RunRecord

#: Reasons of the outcomes of requests whose clients leave.
LEAVING_REASONS = {
    Outcome.STARVED: "the client gave up",
    Outcome.CANCELLED: "another branch ended first",
}


class QueueLimit:
    """Limit on the requests that a server admits, with counts of the admitted requests."""

    def __init__(self, admission: AdmissionCheck) -> None:
        self._admission = admission
        self._admitted: set[int] = set()
        self._prompts: dict[int, int] = {}  # for requests without a first token
        self._in_prefill = 0

    def find_rejection(self) -> Refusal | None:
        """Return why a request that arrives now is rejected, or None."""
        return self._admission(len(self._admitted), self._in_prefill)

    def admit(self, request: Request) -> Refusal | None:
        """Admit a request and return None, or return why it is rejected."""
        if refusal := self.find_rejection():
            return refusal
        self._admitted.add(request.id)
        self._prompts[request.id] = request.prompt_tokens
        self._in_prefill += request.prompt_tokens
        return None

    def record_tokens(self, ids: Iterable[int]) -> None:
        """Record that requests received a token."""
        for i in ids:
            self._in_prefill -= self._prompts.pop(i, 0)

    def remove(self, i: int) -> None:
        """Remove a request that has ended or was rejected."""
        self._admitted.discard(i)
        self._in_prefill -= self._prompts.pop(i, 0)


def build_queue_limit(config: EngineConfig) -> QueueLimit | None:
    """Return the queue limit of an engine's server, or None if the server has none."""
    admission = find_engine_spec(config).admission(config)
    return QueueLimit(admission) if admission else None


class Copier(Protocol):
    """Interface of the object that performs the KV copies of batches."""

    def before(self, moves: KvCopies, start: float) -> float:
        """Start the copies that precede a step. Return the time (s) at which the step can begin.

        ``start`` is the planned start of the step.
        """

    def after(self, moves: KvCopies, end: float) -> None:
        """Start the copies that follow a step.

        ``end`` (s) is the end of the step.
        """


class FrontEnd(Protocol):
    """Interface of the API server between clients and an engine."""

    delivered: array[float]

    def receive(self, life: RequestRecord) -> None:
        """Receive a request from a client. The engine receives the request later."""

    def finish(self, life: RequestRecord) -> bool:
        """Deliver the last token of a request. Return whether the client receives it later."""

    def forget(self, i: int) -> bool:
        """Forget a request whose client has left.

        Returns True if the request is not in the engine.
        """

    def close(self) -> None:
        """Record the delivery times that are still missing at the end of the run."""


@mypyc_attr(allow_interpreted_subclasses=True)
class Replica(ABC):
    """Base class of replicas, with the scheduler, the executor and the record of the run.

    - ``ready``: time (s) at which the replica starts to serve requests.
    - ``resolved``, ``on_request_end``: called when a request has ended.
    - ``rank``: if events of several replicas have the same time, the lowest rank comes first.
    - ``inbox``: messages since the last decision: requests, aborted ids and callbacks.
    - ``wake``: event that wakes the replica; None while it is awake.
    """

    # ``run()`` is started as a SimPy process, and requests are passed to ``submit``.

    def __init__(
        self,
        env: simpy.Environment,
        scheduler: Scheduler,
        executor: Executor,
        ready: float,
        resolved: Callable[[], None] | None,
        rank: int,
    ) -> None:
        self.env = env
        self.rank = rank
        self.scheduler = scheduler
        self.executor = executor
        self.record = RunRecord(scheduler.num_blocks)
        self.ready = ready
        self.dead = False
        self.halted = False
        self.on_request_end: Callable[[RequestRecord], None] | None = None
        #: Called when the engine dies.
        self.on_death: Callable[[], None] | None = None
        #: Called with the KV that a schedule call wants to load from another replica.
        self.on_kv_loads: Callable[[list[tuple[int, int]]], None] | None = None
        #: Performs copies to and from host memory, if any.
        self.copy_engine: Copier | None = None
        #: The API server in front of the engine, if its time is simulated.
        self.front_end: FrontEnd | None = None
        #: Called with the ids of requests that receive a token now.
        self.on_tokens: Callable[[Sequence[int]], None] | None = None
        #: Called with the time (s) after each decision or step that may change the prefix cache.
        self.on_cache_change: Callable[[float], None] | None = None
        #: Whether the load may have changed since a router last read it.
        self.changed = True
        #: Admission control of the server in front of the engine; None if it rejects no requests.
        self.queue_limit: QueueLimit | None = None
        #: Returns the limit that a prompt of this number of tokens exceeds, or None.
        self.too_long: Callable[[int], str | None] | None = None
        self.inbox: list[Request | int | Callable[[], None]] = []
        self.wake: simpy.Event | None = None
        self.resolved = resolved
        self._wants_spread = wants_spread(executor)

    # Interface for clients and routers.

    def submit(self, request: Request) -> None:
        """Receive a request."""
        life = self.record.arrive(request)
        if self.queue_limit and (refusal := self.queue_limit.admit(request)):
            self.refuse(life, refusal)
            return
        if self.front_end is None:
            self.inbox.append(request)
        if request.timeout is not None:
            patience = self.env.timeout(max(request.arrival + request.timeout - self.env.now, 0.0))
            patience.callbacks.append(lambda _: self._give_up(life))
        if self.front_end is None:
            self.notify()
        else:
            self.front_end.receive(life)

    def enter(self, request: Request) -> None:
        """Receive a request from the front end."""
        self.inbox.append(request)
        self.notify()

    def call_soon(self, message: Callable[[], None], *, news: bool = True) -> None:
        """Queue a callback to run before the next decision. ``notify`` describes ``news``."""
        self.inbox.append(message)
        self.notify(news=news)

    def disconnect(self, request_id: int, outcome: Outcome = Outcome.STARVED) -> None:
        """Record that the client of a request has left. The request ends with ``outcome``."""
        self._give_up(self.record.requests[request_id], outcome)

    def forget(self, request_id: int) -> None:
        """Remove the record of an ended request to free memory."""
        # The record of the run then does not contain the request.
        self.record.requests.pop(request_id, None)

    def forget_steps(self, kept: int) -> None:
        """Drop old rows of the step log to free memory.

        The last ``kept`` rows remain, and so do the rows of unfinished requests.
        """
        # ``conclude`` cannot be called afterwards.
        log = self.record.steps
        needed = [len(log) - kept]
        for life in self.record.requests.values():
            if life.outcome is None and life.chunk_rows:
                needed.append(life.chunk_rows[0])
        if self.front_end is not None:
            needed.append(log.dropped + len(self.front_end.delivered))
        cut = log.forget(min(needed))
        if self.front_end is not None:
            del self.front_end.delivered[:cut]

    def _give_up(self, life: RequestRecord, outcome: Outcome = Outcome.STARVED) -> None:
        """End the request because its client has left."""
        if life.outcome is None:
            self.resolve(life, outcome, LEAVING_REASONS[outcome])
            if self.front_end is None or not self.front_end.forget(life.request.id):
                self.inbox.append(life.request.id)
            self.notify()

    @property
    def num_waiting(self) -> int:
        """Number of waiting requests."""
        # The number includes requests that the scheduler has not received yet.
        new = sum(isinstance(message, Request) for message in self.inbox) if self.inbox else 0
        return self.scheduler.num_waiting + new

    @property
    def num_running(self) -> int:
        """Number of running requests."""
        return self.scheduler.num_running

    @property
    def free_blocks(self) -> int:
        """Number of blocks that can be allocated."""
        return self.scheduler.free_blocks

    def catch_up(self) -> None:  # noqa: B027
        """Advance the scheduler to the present time."""
        # Only engines that leap can be behind.

    # Run and end.

    @abstractmethod
    def run(self) -> SimProcess:
        """SimPy process: run the replica to its end."""

    def halt(self) -> list[RequestRecord]:
        """Stop permanently, even in the middle of a step. Return the unfinished requests."""
        self.halted = True
        self.record.end = self.env.now
        return [life for life in self.record.requests.values() if life.outcome is None]

    def conclude(self, requests: Iterable[Request], horizon: float | None) -> RunRecord:
        """End the run. Assign an outcome to every request and close the record."""
        record = self.record
        if horizon is not None:
            record.end = horizon
        for request in requests:
            if request.id not in record.requests:
                record_cut_off(record, request)
        assign_outcomes(record, horizon)
        self.finalize()
        return record

    @abstractmethod
    def finalize(self) -> None:
        """Close the record at the end of the run."""

    def run_notes(self) -> list[str]:
        """Return notes on the run, one sentence each."""
        # Notes that can be derived from the record are not included.
        return []

    # Interface for subclasses and the fleet.

    def timeout_at(self, time: float, after: int = 0) -> ExactTimeout:
        """Return an event at ``time`` (s), after all external events at that time.

        If several replicas have events at that time, the lowest sum of rank and ``after`` comes
        first.
        """
        return ExactTimeout(self.env, time, self.rank + after)

    def sleep(self) -> simpy.Event:
        """Sleep until an external event. Return the event that ends the sleep."""
        self.wake = self.env.event()
        return self.wake

    def notify(self, *, news: bool = True) -> None:  # noqa: ARG002
        """Report an event. The replica makes its next decision as soon as possible.

        ``news`` is False if the replica's own work caused the event.
        """
        # Such events may repeat forever, so they do not count as progress.
        self.changed = True
        self.record.end = self.env.now
        if self.wake is not None:
            self.wake.succeed()
            self.wake = None

    def load(self, batch: Batch) -> StepLoad:
        """Return the load of a batch. The load determines how long the batch takes."""
        return compute_step_load(batch, spread=self._wants_spread)

    def resolve(self, life: RequestRecord, outcome: Outcome, reason: str = "") -> None:
        """End a request.

        A request that has already ended is not changed.
        """
        if life.outcome is None:
            self.changed = True
            life.outcome, life.reason, life.ended_at = outcome, reason, self.env.now
            if self.queue_limit:
                self.queue_limit.remove(life.request.id)
            if self.resolved:
                self.resolved()
            if self.on_request_end:
                self.on_request_end(life)

    def refuse(self, life: RequestRecord, refusal: Refusal) -> None:
        """Reject a request that exceeds a limit.

        A request that has already ended is not changed.
        """
        if life.outcome is None:
            life.refusal = refusal
            self.record.end = max(self.record.end, self.env.now)
            self.reject(life, f"{refusal.knob}: {refusal.words}", refusal.knob)

    def reject(
        self,
        life: RequestRecord,
        otherwise: str = "the engine gave up on it",
        limit: str | None = None,
    ) -> None:
        """Reject a request.

        The reason names the limit that the prompt exceeds. If the prompt exceeds none, the reason
        is ``otherwise``.
        """
        # ``limit`` is the name of the limit, or None for any limit.
        why = self.too_long(life.request.prompt_tokens) if self.too_long else None
        named = why is not None and (limit is None or f" {limit} " in why)
        self.resolve(life, Outcome.REJECTED, why if why and named else otherwise)

    def die(self, kind: str, why: str, requests: Iterable[int]) -> None:
        """Stop permanently, as after a crash of the engine.

        ``requests`` are the affected requests.
        """
        self.dead = True
        held = dict(self.scheduler.blocks_held())
        self.record.engine_halt = EngineHalt(kind, self.env.now, why, sorted(set(requests)), held)
        if self.on_death:
            self.on_death()


def record_cut_off(record: RunRecord, request: Request) -> None:
    """Record a request that was not sent before the run ended. Its outcome is "cut off"."""
    life = record.arrive(request)
    life.outcome, life.reason = Outcome.CUT_OFF, "it was not sent before the run ended"
    life.ended_at = request.arrival


def assign_outcomes(record: RunRecord, horizon: float | None) -> None:
    """Assign an outcome to each request that does not have one."""
    # If a client gave up after the engine had halted, the outcome of its request is changed to
    # stalled, because the halt was the cause.
    stop = record.engine_halt
    for life in record.requests.values():
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
            life.outcome, life.reason = Outcome.CUT_OFF, "the run reached its horizon"
        elif life.outcome is None:
            life.outcome, life.reason = Outcome.LOST, "the engine went idle without finishing it"
        if life.ended_at is None:
            life.ended_at = record.end
