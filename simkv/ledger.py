"""The wait ledger: every second of a request's life under one name, from arrival to end.

    for interval in ledger(record)[7]:
        print(interval.start, interval.end, WORDS[interval.kind])

The times of steps come from the step log; why somebody waits comes from the scheduler, which says
with each decision why it passed over the head of its queue (``Batch.held``) and who sat out though
it holds its place (``Batch.aside``).
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import NamedTuple

from simkv.record import Record


class Kind(StrEnum):
    """What a request does or waits for: exactly one of these at any moment of its life."""

    UNSEEN = "unseen"  # the engine has not looked at it: it was in a step, or not ready
    BLOCKS = "blocks"  # head of the queue, too few blocks are free
    RESERVED = "reserved"  # head of the queue, blocks are free but promised to others
    SLOT = "slot"  # head of the queue, as many run as may
    BUDGET = "budget"  # passed over, the tokens of the step were used up
    RULE = "rule"  # passed over by a rule of the engine, such as an interval between prefills
    BEHIND = "behind"  # in the queue, but not its head
    DEFERRED = "deferred"  # in a group (of length, of modality) that does not run now
    PREFILL = "prefill"
    RECOMPUTE = "recompute"  # prefill of tokens that had been computed before
    DECODE = "decode"
    HELD_UP = "held_up"  # has its KV and sits out steps in which others prefill
    PREEMPTED = "preempted"  # its computed KV was taken away and it has not run again
    IN_FLIGHT = "in_flight"  # decided but not begun, computed but not delivered, between steps
    STALLED = "stalled"  # the engine has died, or its state repeats for ever


#: The kinds in plain words.
WORDS: dict[Kind, str] = {
    Kind.UNSEEN: "not yet looked at",
    Kind.BLOCKS: "queued for blocks",
    Kind.RESERVED: "queued for blocks that are reserved",
    Kind.SLOT: "queued for a slot",
    Kind.BUDGET: "queued for token budget",
    Kind.RULE: "kept out by a rule",
    Kind.BEHIND: "behind the head of the queue",
    Kind.DEFERRED: "in a deferred bucket",
    Kind.PREFILL: "prefill",
    Kind.RECOMPUTE: "recomputing",
    Kind.DECODE: "decode",
    Kind.HELD_UP: "held up while others prefill",
    Kind.PREEMPTED: "preempted and waiting",
    Kind.IN_FLIGHT: "in flight",
    Kind.STALLED: "stalled for good",
}

#: Kinds in which a request stands in the queue and has never run.
QUEUED = frozenset(
    {Kind.UNSEEN, Kind.BLOCKS, Kind.RESERVED, Kind.SLOT, Kind.BUDGET, Kind.RULE, Kind.BEHIND}
)
#: Kinds in which the GPU computes for the request.
SERVED = frozenset({Kind.PREFILL, Kind.RECOMPUTE, Kind.DECODE})


class Interval(NamedTuple):
    """A request is in ``kind`` from ``start`` to ``end``, in seconds from the start of the run."""

    kind: Kind
    start: float
    end: float

    @property
    def seconds(self) -> float:
        """How long it lasts."""
        return self.end - self.start


def ledger(record: Record) -> dict[int, list[Interval]]:
    """Every request's life in intervals, by id.

    They tile it: the first starts at the arrival, each next one where the one before ends, the last
    ends with the request (``Life.ended_at``), and neighbours differ in kind. So they sum exactly to
    its E2E, or for a request that did not finish to the time until its outcome. A request that
    would have arrived after the end of the run has none.
    """
    raise NotImplementedError


def totals(intervals: Iterable[Interval]) -> dict[Kind, float]:
    """Seconds in each kind, in the order of ``Kind``, without those that did not occur."""
    raise NotImplementedError
