"""Verdicts: the engine stopped permanently because of a livelock, a deadlock or a crash."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from simkv.core.outcome import Outcome
from simkv.core.scheduler_protocol import blocks_for
from simkv.explain.computed_runs import compute_runs
from simkv.explain.ledger_kinds import KIND_LABELS, LedgerKind
from simkv.explain.verdicts.verdict import (
    Verdict,
    count_phrase,
    name_requests,
    requests_with_outcome,
)
from simkv.sim.run_record import EngineHalt, RequestRecord, RunRecord

#: Maximum number of a livelock's decisions that are listed as evidence.
MAX_LISTED_DECISIONS = 32


class Decision(NamedTuple):
    """A schedule call at ``at`` (s), with the ids of the scheduled and preempted requests."""

    at: float
    prefill: tuple[int, ...]
    decode: tuple[int, ...]
    preempted: tuple[int, ...]

    def __str__(self) -> str:
        acts = ("prefill", self.prefill), ("decode", self.decode), ("preempt", self.preempted)
        said = [f"{verb} {name_requests(ids)}" for verb, ids in acts if ids]
        return "; ".join(said) or "nothing"


@dataclass(frozen=True)
class LivelockVerdict(Verdict):
    """The engine runs forever without emitting tokens, because its state repeats.

    The repetition was detected at ``since`` (s). The state repeats after ``decisions`` schedule
    calls, which take ``seconds``. ``cycle`` lists the first of these calls. ``cycle`` is empty if a
    single ``schedule`` call loops forever.
    """

    name = "livelock"
    since: float
    why: str
    seconds: float
    decisions: int
    cycle: tuple[Decision, ...]

    @property
    def text(self) -> str:
        text = (
            f"from {self.since:.3f} s: {self.why}; the state repeats among "
            f"{name_requests(self.requests)}"
        )
        if self.cycle:
            steps = "decision" if self.decisions == 1 else f"{self.decisions} decisions"
            text += f", every {steps} and {self.seconds:.3f} s: "
            text += " → ".join(map(str, self.cycle[:4])) + " → …" * (self.decisions > 4)
        return text


@dataclass(frozen=True)
class Deadlock(Verdict):
    """No request can ever run again.

    ``stuck`` contains the ids of all affected requests. ``holds`` contains the number of blocks
    that each request holds. ``lacks`` contains the number of additional blocks that each request
    needs for its next token. ``free`` is the number of free blocks. ``head`` is the first request
    in the queue, and ``kind`` is the resource that it waits for.
    """

    name = "deadlock"
    since: float
    why: str
    stuck: tuple[int, ...]
    holds: dict[int, int]
    lacks: dict[int, int]
    free: int
    head: int | None
    kind: LedgerKind | None

    @property
    def text(self) -> str:
        stuck = f"{count_phrase(self.stuck)} stuck, {self.free} blocks free"
        said = [f"from {self.since:.3f} s: {self.why}", stuck]
        for i in self.requests:
            waits = f" ({KIND_LABELS[self.kind]})" if i == self.head and self.kind else ""
            held = f" holds {self.holds[i]} blocks and" if i in self.holds else ""
            said.append(f"request {i}{waits}{held} lacks {self.lacks[i] or 'none'}")
        return "; ".join(said)


@dataclass(frozen=True)
class EngineDied(Verdict):
    """The real engine would crash or hang at ``since`` (s)."""

    name = "engine died"
    since: float
    why: str

    @property
    def text(self) -> str:
        return f"at {self.since:.3f} s: {self.why}"


def find_engine_halt(record: RunRecord, block_size: int) -> Verdict | None:
    """Return the verdict on a permanent stop of the engine, or None."""
    stop = record.engine_halt
    if stop is None or not (stalled := requests_with_outcome(record, Outcome.STALLED)):
        return None
    if stop.kind == "livelock":
        return _livelock(record, stop)
    if stop.kind == "deadlock":
        return _deadlock(record, stop, stalled, block_size)
    requests = tuple(stop.requests) or (stalled[0].request.id,)
    return EngineDied(requests, stop.since, stop.why)


def _livelock(record: RunRecord, stop: EngineHalt) -> LivelockVerdict:
    log = record.steps
    begin = stop.since if stop.cycle_start is None else stop.cycle_start
    first, last = bisect_left(log.decided, begin), bisect_left(log.decided, stop.since) - 1
    acts: dict[float, tuple[list[int], list[int], list[int]]] = {}
    for i, life in record.requests.items():
        for at in life.preempted_at[bisect_left(life.preempted_at, begin) :]:
            if at < stop.since:
                acts.setdefault(at, ([], [], []))[2].append(i)
        for run in compute_runs(life):
            for row in range(max(run.first, first), min(run.last, last) + 1):
                at = log.decided[row]
                acts.setdefault(at, ([], [], []))[run.kind is LedgerKind.DECODE].append(i)
    cycle = tuple(Decision(at, *map(tuple, acts[at])) for at in sorted(acts))
    taking_part = {i for decision in cycle for ids in decision[1:] for i in ids}
    requests = tuple(sorted(taking_part) or stop.requests)
    seconds = stop.since - begin
    return LivelockVerdict(
        requests, stop.since, stop.why, seconds, len(cycle), cycle[:MAX_LISTED_DECISIONS]
    )


def _deadlock(
    record: RunRecord, stop: EngineHalt, stalled: Sequence[RequestRecord], block_size: int
) -> Deadlock:
    stuck = tuple(life.request.id for life in stalled)
    holds = {i: blocks for i, blocks in stop.held.items() if blocks}
    head = record.queue_heads[-1][1] if record.queue_heads else None
    shown = sorted((i for i in stuck if i in holds), key=lambda i: (-holds[i], i))[:2]
    requests = tuple(dict.fromkeys([*shown, *([head.id] if head else [])])) or stuck[:1]
    lacks = {i: _lacks(record.requests[i], holds.get(i, 0), block_size) for i in requests}
    free = max(record.num_blocks - sum(holds.values()), 0)
    first, kind = (head.id, LedgerKind(head.why)) if head else (None, None)
    return Deadlock(requests, stop.since, stop.why, stuck, holds, lacks, free, first, kind)


def _lacks(life: RequestRecord, held: int, block_size: int) -> int:
    """Return the number of blocks that a request lacks for its next token."""
    return max(blocks_for(life.request.prompt_tokens + life.tokens, block_size) - held, 0)
