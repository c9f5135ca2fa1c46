"""A replica as clients and routers see it, whatever goes on inside."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import simpy
from mypy_extensions import mypyc_attr

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
from simkv.sim.clock import ExactTimeout, SimProcess
from simkv.sim.final_outcomes import assign_outcomes, record_cut_off
from simkv.sim.queue_limit import QueueLimit
from simkv.sim.run_record import EngineHalt, RequestRecord, RunRecord


class Copier(Protocol):
    """Carries out what batches say of copies beside the steps (``KvCopies``)."""

    def before(self, moves: KvCopies, start: float) -> float:
        """A step is to begin at ``start``. Returns when it can (s)."""

    def after(self, moves: KvCopies, end: float) -> None:
        """The step is over at ``end`` (s)."""


@mypyc_attr(allow_interpreted_subclasses=True)
class Replica(ABC):
    """A scheduler, an executor and the record of what they did.

    Start ``run()`` as a SimPy process and hand requests to ``submit``. Requests that come before
    ``ready`` (s) wait until then. ``resolved`` is called whenever a request has ended, and
    ``ended`` is told how. Of several replicas in one world those of a lower ``rank`` go first at
    one time.

    ``inbox`` is what came from outside since the last decision: requests, the ids of those whose
    clients are gone, and messages to be called. ``wake`` is what ends its sleep; None while it is
    awake.
    """

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
        self.ended: Callable[[RequestRecord], None] | None = None
        #: Called when the engine has died.
        self.died: Callable[[], None] | None = None
        #: Told what KV a schedule call wants to have from elsewhere.
        self.loads: Callable[[list[tuple[int, int]]], None] | None = None
        #: What carries out copies to and from host memory, where there are any.
        self.copies: Copier | None = None
        #: Told whose clients are given a token now, if anybody asks.
        self.delivered: Callable[[Sequence[int]], None] | None = None
        #: Whether it may be loaded otherwise than when a router looked last.
        self.changed = True
        #: What the server in front of it asks, where it turns requests away.
        self.queue_limit: QueueLimit | None = None
        #: Names the limit that a prompt of so many tokens is beyond, if it is.
        self.too_long: Callable[[int], str | None] | None = None
        self.inbox: list[Request | int | Callable[[], None]] = []
        self.wake: simpy.Event | None = None
        self.resolved = resolved
        self._spread = wants_spread(executor)

    # What clients and routers do.

    def submit(self, request: Request) -> None:
        """A request comes now; its client starts to wait."""
        life = self.record.arrive(request)
        if self.queue_limit and (refusal := self.queue_limit.enter(request)):
            self.refuse(life, refusal)
            return
        self.inbox.append(request)
        if request.timeout is not None:
            patience = self.env.timeout(max(request.arrival + request.timeout - self.env.now, 0.0))
            patience.callbacks.append(lambda _: self._give_up(life))
        self.notify()

    def tell(self, message: Callable[[], None], *, news: bool = True) -> None:
        """Something takes effect before the next decision; see ``stir``."""
        self.inbox.append(message)
        self.notify(news=news)

    def leave(self, request_id: int) -> None:
        """The client of a request that came is gone now."""
        self._give_up(self.record.requests[request_id])

    def _give_up(self, life: RequestRecord) -> None:
        """The client's patience is over."""
        if life.outcome is None:
            self.resolve(life, Outcome.STARVED, "the client gave up")
            self.inbox.append(life.request.id)
            self.notify()

    @property
    def num_waiting(self) -> int:
        """Requests that wait now, those that the scheduler has not been told of included."""
        new = sum(isinstance(message, Request) for message in self.inbox) if self.inbox else 0
        return self.scheduler.num_waiting + new

    @property
    def num_running(self) -> int:
        """Requests that run now."""
        return self.scheduler.num_running

    @property
    def free_blocks(self) -> int:
        """Blocks that can be had now."""
        return self.scheduler.free_blocks

    # How it runs and ends.

    @abstractmethod
    def run(self) -> SimProcess:
        """Its work until it is over, as a SimPy process."""

    def halt(self) -> list[RequestRecord]:
        """Stop for good now, in the middle of a step; returns the requests that have not ended."""
        self.halted = True
        self.record.end = self.env.now
        return [life for life in self.record.requests.values() if life.outcome is None]

    def conclude(self, requests: Iterable[Request], horizon: float | None) -> RunRecord:
        """The run is over: every one of ``requests`` gets its outcome, and the record is closed."""
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
        """The run ends now: close the record."""

    def run_notes(self) -> list[str]:
        """What a reader of its run must know beside the record."""
        return []

    # For those who make it go.

    def timeout_at(self, time: float, after: int = 0) -> ExactTimeout:
        """A point in time of this replica: after what comes from outside, in order of ranks."""
        return ExactTimeout(self.env, time, self.rank + after)

    def sleep(self) -> simpy.Event:
        """There is nothing to do: what happens when something comes from outside."""
        self.wake = self.env.event()
        return self.wake

    def notify(self, *, news: bool = True) -> None:  # noqa: ARG002
        """Something came: it looks again as soon as it can. What is no ``news`` follows from what
        it did itself, and may go on so for ever."""
        self.changed = True
        self.record.end = self.env.now
        if self.wake is not None:
            self.wake.succeed()
            self.wake = None

    def load(self, batch: Batch) -> StepLoad:
        """What the executor is told of a batch."""
        return compute_step_load(batch, spread=self._spread)

    def resolve(self, life: RequestRecord, outcome: Outcome, reason: str = "") -> None:
        """A request has ended now, unless it had before."""
        if life.outcome is None:
            self.changed = True
            life.outcome, life.reason, life.ended_at = outcome, reason, self.env.now
            if self.queue_limit:
                self.queue_limit.left(life.request.id)
            if self.resolved:
                self.resolved()
            if self.ended:
                self.ended(life)

    def refuse(self, life: RequestRecord, refusal: Refusal) -> None:
        """A request is refused for a limit now, unless it had ended before."""
        if life.outcome is None:
            life.refusal = refusal
            self.record.end = max(self.record.end, self.env.now)
            self.reject(life, f"{refusal.knob}: {refusal.words}", refusal.knob)

    def reject(
        self,
        life: RequestRecord,
        otherwise: str = "the engine gave it up",
        limit: str | None = None,
    ) -> None:
        """A request is refused now: its prompt is beyond the ``limit`` (any, if None), or why
        ``otherwise``."""
        why = self.too_long(life.request.prompt_tokens) if self.too_long else None
        named = why is not None and (limit is None or f" {limit} " in why)
        self.resolve(life, Outcome.REJECTED, why if why and named else otherwise)

    def die(self, kind: str, why: str, requests: Iterable[int]) -> None:
        """It stops for good now, as the real engine would, while it is about these requests."""
        self.dead = True
        held = dict(self.scheduler.blocks_held())
        self.record.engine_halt = EngineHalt(kind, self.env.now, why, sorted(set(requests)), held)
        if self.died:
            self.died()
