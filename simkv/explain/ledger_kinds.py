"""Kinds of intervals in the wait ledger, and the intervals themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple

#: Times (s) that differ by less than this count as equal, because they are sums of the same
#: durations in different orders.
NEGLIGIBLE = 1e-7


class LedgerKind(StrEnum):
    """State of a request at a point in time: the work done for it, or the reason for its wait."""

    FRONT_END = "front_end"  # the API server works on the request, or on its tokens
    # the scheduler has not received the request yet, because a step was in progress
    UNSEEN = "unseen"
    BLOCKS = "blocks"  # too few blocks are free
    RESERVED = "reserved"  # blocks are free, but reserved for other requests
    SLOT = "slot"  # the maximum number of requests is running
    ADAPTER = "adapter"  # the maximum number of LoRA adapters is running
    KV = "kv"  # the KV of the request is being copied from host memory, or will be soon
    # the KV of the request is being read from disk to host memory, or looked up on disk
    DISK = "disk"
    REMOTE = "remote"  # another replica is sending the KV of the request
    BUDGET = "budget"  # the token budget of the step is used up
    RULE = "rule"  # another rule of the engine, such as an interval between prefills
    BEHIND = "behind"  # in the queue behind its head
    QUEUED = "queued"  # the scheduler does not report the reason
    DEFERRED = "deferred"  # only another bucket (of length or modality) runs now
    PREFILL = "prefill"
    RECOMPUTE = "recompute"  # prefill, mostly of tokens that had been computed before
    EVICTED = "evicted"  # prefill, mostly of a prefix that was evicted after an earlier turn
    DECODE = "decode"
    # the KV of the request is complete, but it is not part of steps in which others prefill
    HELD_UP = "held_up"
    PREEMPTED = "preempted"  # the request has lost computed KV and has not resumed yet
    # its step is decided but not started, or computed but not delivered, or no step runs
    IN_FLIGHT = "in_flight"
    STALLED = "stalled"  # the engine has died, or its state repeats forever


#: Labels of the kinds for output.
KIND_LABELS: dict[LedgerKind, str] = {
    LedgerKind.FRONT_END: "in the API server",
    LedgerKind.UNSEEN: "not yet seen by scheduler",
    LedgerKind.BLOCKS: "waiting for KV blocks",
    LedgerKind.RESERVED: "waiting for reserved KV blocks",
    LedgerKind.SLOT: "waiting for a slot",
    LedgerKind.ADAPTER: "waiting for a LoRA slot",
    LedgerKind.KV: "waiting for KV from host memory",
    LedgerKind.DISK: "waiting for KV from disk",
    LedgerKind.REMOTE: "waiting for KV from another replica",
    LedgerKind.BUDGET: "waiting for token budget",
    LedgerKind.RULE: "excluded by a scheduling rule",
    LedgerKind.BEHIND: "behind the head of the queue",
    LedgerKind.QUEUED: "waiting, reason not reported",
    LedgerKind.DEFERRED: "in a deferred bucket",
    LedgerKind.PREFILL: "prefill",
    LedgerKind.RECOMPUTE: "recomputing",
    LedgerKind.EVICTED: "recomputing a prefix evicted while idle",
    LedgerKind.DECODE: "decode",
    LedgerKind.HELD_UP: "delayed by prefill of others",
    LedgerKind.PREEMPTED: "preempted, waiting to resume",
    LedgerKind.IN_FLIGHT: "in flight",
    LedgerKind.STALLED: "stalled permanently",
}

#: Kinds in which a request waits to be admitted or readmitted.
WAIT_KINDS = frozenset(
    {
        LedgerKind.UNSEEN,
        LedgerKind.BLOCKS,
        LedgerKind.RESERVED,
        LedgerKind.SLOT,
        LedgerKind.ADAPTER,
        LedgerKind.KV,
        LedgerKind.DISK,
        LedgerKind.REMOTE,
        LedgerKind.BUDGET,
        LedgerKind.RULE,
        LedgerKind.BEHIND,
        LedgerKind.QUEUED,
        LedgerKind.DEFERRED,
        LedgerKind.PREEMPTED,
    }
)
#: Kinds in which the GPU computes for the request.
COMPUTE_KINDS = frozenset(
    {LedgerKind.PREFILL, LedgerKind.RECOMPUTE, LedgerKind.EVICTED, LedgerKind.DECODE}
)


class LedgerSegment(NamedTuple):
    """An interval in which the state of a request does not change. Times are in seconds."""

    kind: LedgerKind
    start: float
    end: float

    @property
    def seconds(self) -> float:
        """Duration in seconds."""
        return self.end - self.start


#: Ledger segments of each request, by id.
Ledger = Mapping[int, Sequence[LedgerSegment]]
