"""The resource that delayed requests, and the load of the engine during the delay."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np
from numpy.typing import NDArray

from simkv.core.engine_spec import EngineConfig, EngineSpec
from simkv.explain.ledger_kinds import COMPUTE_KINDS, KIND_LABELS, LedgerKind, LedgerSegment
from simkv.sim.run_record import RunRecord

#: If the KV cache use (0 to 1) is at least this, the cache is the bottleneck, whatever the head of
#: the queue waits for.
FULL = 0.95
#: KV cache use (0 to 1) below which the cache is clearly not the bottleneck.
MOSTLY_EMPTY = 0.5
#: Resources that can be the bottleneck only while the KV cache has free space.
_BEFORE_FULL = {LedgerKind.SLOT, LedgerKind.BUDGET, LedgerKind.QUEUED}
_BLOCKS = {LedgerKind.BLOCKS, LedgerKind.RESERVED}


@dataclass(frozen=True)
class Bottleneck:
    """The resource that requests waited for longest, for ``seconds`` in total.

    ``kv_use`` is the mean use of the KV cache during the wait (0 to 1). ``blocks`` is the number of
    blocks in the cache. ``running`` and ``waiting`` are the maximum numbers of running and waiting
    requests during the wait.
    """

    kind: LedgerKind
    seconds: float
    kv_use: float
    blocks: int
    running: int
    waiting: int

    def describe(self, config: EngineConfig, spec: EngineSpec) -> str:
        """Return the bottleneck as a phrase, with the engine setting that limits the resource.

        For example: ``all 32 slots busy (max_num_seqs=32), KV cache only 16 % used``.
        """
        used = f"{100 * self.kv_use:.0f} %"
        if self.kind in _BLOCKS:
            state = f"{used} of {self.blocks:,} blocks used"
            queued = f"up to {self.waiting:,} request{'s' if self.waiting != 1 else ''} queued"
            if self.kv_use >= 0.9:
                return f"KV cache full ({state}), {queued}"
            if self.kind is LedgerKind.RESERVED:
                return f"free KV blocks reserved for running requests ({state}), {queued}"
            return f"too few free KV blocks for the next request ({state}), {queued}"
        kv = f"KV cache {'only ' if self.kv_use < MOSTLY_EMPTY else ''}{used} used"
        match self.kind:
            case LedgerKind.SLOT:
                seats = getattr(config, spec.seats, None) or self.running
                return f"all {seats:,} slots busy ({spec.seats}={seats}), {kv}"
            case LedgerKind.BUDGET:
                budget = getattr(config, spec.step_tokens, None)
                setting = "" if budget is None else f" ({spec.step_tokens}={budget})"
                return f"token budget of each step used up{setting}, {kv}"
            case LedgerKind.ADAPTER:
                adapters = getattr(config, "max_loras", None)
                count = "LoRA slots" if adapters is None else f"{adapters:,} LoRA slots"
                setting = "" if adapters is None else f" (max_loras={adapters})"
                return f"all {count} busy{setting}, {kv}"
        return f"{_CAUSES.get(self.kind, KIND_LABELS[self.kind])}, {kv}"

    def limiting_setting(self, spec: EngineSpec) -> str | None:
        """Return the name of the engine setting that limits the resource while the KV cache is
        mostly empty, or None.
        """
        if self.kv_use >= MOSTLY_EMPTY:
            return None
        return {LedgerKind.SLOT: spec.seats, LedgerKind.BUDGET: spec.step_tokens}.get(self.kind)


#: Minimum fraction of the requests' time for which the API server can be the bottleneck.
MIN_FRONT_END_SHARE = 0.05

_CAUSES = {
    LedgerKind.RULE: "a scheduling rule excluded requests",
    LedgerKind.DEFERRED: "only one bucket of requests (of one length or modality) runs at a time",
    LedgerKind.KV: "KV had to be loaded from host memory",
    LedgerKind.DISK: "KV had to be read from disk",
    LedgerKind.REMOTE: "KV had to be sent by another replica",
    LedgerKind.HELD_UP: "decodes paused while other requests prefilled",
    LedgerKind.FRONT_END: "the API server delayed requests or tokens",
    LedgerKind.UNSEEN: "requests arrived during long steps and waited for the end of the step",
    LedgerKind.IN_FLIGHT: "the engine was busy between steps",
    LedgerKind.STALLED: "the engine had halted",
}


def find_bottleneck(
    record: RunRecord,
    ledger: Mapping[int, Sequence[LedgerSegment]],
    requests: Collection[int],
) -> Bottleneck | None:
    """Return the resource that ``requests`` waited for longest, or None if they never waited.

    Requests behind the head of the queue wait for the same resource as the head. ``record`` is the
    record of one replica.
    """
    heads = _Heads(record)
    seconds = _seconds_by_resource(record, ledger, requests, heads)
    whole = sum(tile.seconds for i in requests for tile in ledger[i])
    if seconds.get(LedgerKind.FRONT_END, 0.0) < MIN_FRONT_END_SHARE * whole:
        seconds.pop(LedgerKind.FRONT_END, None)
    if not seconds:
        return None
    kind = max(seconds, key=lambda kind: seconds[kind])
    log = record.steps
    rows = heads.rows(kind)
    if not rows.any():
        rows = np.array(log.waiting) > 0
    if not rows.any():
        rows = np.ones(len(log), dtype=bool)
    lasted = (np.array(log.end) - np.array(log.start))[rows]
    free = np.array(log.free_blocks)[rows]
    use = 0.0
    if record.num_blocks and lasted.sum() > 0:
        use = 1.0 - float((free * lasted).sum() / lasted.sum()) / record.num_blocks
    return Bottleneck(
        LedgerKind.BLOCKS if kind in _BEFORE_FULL and use >= FULL else kind,
        seconds[kind],
        use,
        record.num_blocks,
        int(np.array(log.running)[rows].max(initial=0)),
        int(np.array(log.waiting)[rows].max(initial=0)),
    )


def _seconds_by_resource(
    record: RunRecord,
    ledger: Mapping[int, Sequence[LedgerSegment]],
    requests: Collection[int],
    heads: _Heads,
) -> dict[LedgerKind, float]:
    """Return the waiting time (s) of ``requests`` by resource.

    A preempted request waits for its length bucket if it was preempted for another bucket. Other
    preempted requests wait for blocks.
    """
    seconds: dict[LedgerKind, float] = {}
    for i in requests:
        bucketed = any(cause.why == "bucket" for cause in record.requests[i].causes)
        for tile in ledger.get(i, ()):
            parts = {tile.kind: tile.seconds}
            if tile.kind is LedgerKind.BEHIND:
                parts = heads.between(tile.start, tile.end)
            elif tile.kind is LedgerKind.PREEMPTED:
                kind = LedgerKind.DEFERRED if bucketed else LedgerKind.BLOCKS
                parts = {kind: tile.seconds}
            for kind, spent in parts.items():
                if kind not in COMPUTE_KINDS:
                    seconds[kind] = seconds.get(kind, 0.0) + spent
    return seconds


class _Heads:
    """The resource that the head of the queue waits for, over time."""

    def __init__(self, record: RunRecord) -> None:
        self._decided = np.array(record.steps.decided)
        ends = [at for at, _ in record.queue_heads[1:]] + [record.end]
        self._times: dict[LedgerKind, tuple[list[float], list[float]]] = {}
        for (start, held), end in zip(record.queue_heads, ends, strict=False):
            if held and end > start:
                starts, stops = self._times.setdefault(LedgerKind(held.why), ([], []))
                starts.append(start)
                stops.append(end)
        self._known = {kind: _Cumulative(*times) for kind, times in self._times.items()}

    def between(self, start: float, end: float) -> dict[LedgerKind, float]:
        """Return the seconds for which the head waited for each resource between two times (s)."""
        return {kind: known.at(end) - known.at(start) for kind, known in self._known.items()}

    def rows(self, kind: LedgerKind) -> NDArray[np.bool_]:
        """Return a mask of the steps that were scheduled while the head waited for the resource."""
        starts, ends = self._times.get(kind, ([], []))
        place = np.searchsorted(np.array(starts), self._decided, side="right")
        until = np.array([-inf, *ends])[place]
        return self._decided < until


class _Cumulative:
    """Total length of ordered intervals up to a given time, in seconds."""

    def __init__(self, starts: list[float], ends: list[float]) -> None:
        self._edges = np.ravel(np.column_stack([starts, ends]))
        lengths = np.column_stack([np.zeros(len(starts)), np.subtract(ends, starts)])
        self._sums = np.cumsum(np.ravel(lengths))

    def at(self, time: float) -> float:
        """Return the total length (s) of the intervals before ``time``."""
        return float(np.interp(time, self._edges, self._sums, left=0.0))
