"""What is kept of a run: one row per step, and per request a short list of segments."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from simkv.executors import Load
from simkv.request import Request
from simkv.schedulers.base import Batch


class Outcome(StrEnum):
    """How a request ended: exactly one of these."""

    FINISHED = "finished"
    STARVED = "starved"  # the client gave up
    REJECTED = "rejected"  # the engine said no
    LOST = "lost"  # the engine forgot it
    STALLED = "stalled"  # it can never finish, or the engine died
    CUT_OFF = "cut_off"  # the horizon came first


class Segment(NamedTuple):
    """A request in consecutive rows ``first`` to ``last`` of the step log.

    A ``decode`` emits one token at the end of each of them, a ``prefill`` at most one, at the end
    of the last, if ``emits``.
    """

    kind: str
    first: int
    last: int
    emits: bool


NOTHING = Segment("", -1, -1, False)


@dataclass(slots=True)
class Life:
    """One request's way through the engine; times in seconds since the start of the run.

    ``preempted_at`` are the times at which computed KV was taken away, ``bounces`` how often the
    engine took back blocks before it had computed anything into them. ``recomputed_tokens`` had
    been computed before. ``tokens`` reached the client.
    """

    request: Request
    outcome: Outcome | None = None
    reason: str = ""
    first_token: float | None = None
    last_token: float | None = None
    ended_at: float | None = None
    tokens: int = 0
    bounces: int = 0
    recomputed_tokens: int = 0
    preempted_at: list[float] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)

    @property
    def deadline(self) -> float | None:
        """When the client gives up, or None."""
        timeout = self.request.timeout
        return None if timeout is None else self.request.arrival + timeout


@dataclass(slots=True)
class StepLog:
    """Columns of the step log: times in seconds, the rest counts after the schedule call."""

    start: array[float] = field(default_factory=lambda: array("d"))
    end: array[float] = field(default_factory=lambda: array("d"))
    kind: list[str] = field(default_factory=list)
    prefill_seqs: array[int] = field(default_factory=lambda: array("q"))
    prefill_tokens: array[int] = field(default_factory=lambda: array("q"))
    decode_seqs: array[int] = field(default_factory=lambda: array("q"))
    preempted: array[int] = field(default_factory=lambda: array("q"))
    waiting: array[int] = field(default_factory=lambda: array("q"))
    running: array[int] = field(default_factory=lambda: array("q"))
    free_blocks: array[int] = field(default_factory=lambda: array("q"))

    def __len__(self) -> int:
        return len(self.end)


@dataclass(slots=True)
class Standstill:
    """The engine stopped for good at ``since``: it died, or its state repeats for ever."""

    kind: str
    since: float
    why: str
    requests: list[int]


class Record:
    """Everything that a run leaves behind, written while it goes.

    ``alone_s`` is the time that each request would take by itself, where the executor knows it.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.lives: dict[int, Life] = {}
        self.steps = StepLog()
        self.idle_passes = 0
        self.standstill: Standstill | None = None
        self.end = 0.0
        self.alone_s: dict[int, float] = {}
        self._computed: dict[int, int] = {}
        self._has_kv: set[int] = set()
        self._emitting: set[int] = set()

    def arrive(self, request: Request) -> Life:
        """A request reached the engine."""
        life = self.lives[request.id] = Life(request)
        self._computed[request.id] = 0
        return life

    def decided(self, batch: Batch, now: float) -> None:
        """Note what a schedule call did to requests that it did not run."""
        for i in batch.preempted:
            if i in self._has_kv:
                self._has_kv.discard(i)
                self.lives[i].preempted_at.append(now)
            else:
                self.lives[i].bounces += 1

    def step(
        self,
        batch: Batch,
        load: Load,
        start: float,
        end: float,
        *,
        waiting: int,
        running: int,
        free_blocks: int,
    ) -> None:
        """Append a row for a step that ran from ``start`` to ``end``, and its segments."""
        log = self.steps
        row = len(log)
        log.start.append(start)
        log.end.append(end)
        log.kind.append(batch.kind)
        log.prefill_seqs.append(load.prefill_seqs)
        log.prefill_tokens.append(load.prefill_tokens)
        log.decode_seqs.append(load.decode_seqs)
        log.preempted.append(len(batch.preempted))
        log.waiting.append(waiting)
        log.running.append(running)
        log.free_blocks.append(free_blocks)
        emits = set(batch.emits)
        known = self._emitting
        for (i, tokens), context in zip(batch.scheduled, batch.context, strict=True):
            life = self.lives[i]
            self._count_tokens(life, context, tokens)
            kind = "decode" if tokens == 1 and i in known and i in emits else "prefill"
            segments = life.segments
            previous = segments[-1] if segments else NOTHING
            goes_on = previous.kind == kind and previous.last == row - 1
            if goes_on and (kind == "decode" or not previous.emits):
                segments[-1] = Segment(kind, previous.first, row, i in emits)
            else:
                segments.append(Segment(kind, row, row, i in emits))
        known |= emits

    def _count_tokens(self, life: Life, context: int, tokens: int) -> None:
        i = life.request.id
        known = self._computed[i]
        if known > context:
            life.recomputed_tokens += min(known, context + tokens) - context
        self._computed[i] = max(known, context + tokens)
        self._has_kv.add(i)
