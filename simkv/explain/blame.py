"""Attribution of waiting: blockers, preemptions, overtakes and wasted GPU time."""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, chain, groupby
from math import fsum, inf
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from simkv.core.outcome import Outcome
from simkv.core.scheduler_protocol import blocks_for
from simkv.explain.wait_ledger import (
    NEGLIGIBLE,
    ComputeRun,
    LedgerKind,
    LedgerSegment,
    compute_runs,
    kv_lost_at,
)
from simkv.sim.run_record import RequestRecord, RunRecord

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


class BlockHolding(NamedTuple):
    """A request holds ``blocks`` blocks of KV from ``start`` to ``end`` (s)."""

    start: float
    end: float
    blocks: int


class Blocker(NamedTuple):
    """A request that held a resource for which other requests waited.

    ``seconds`` is the part of their waiting time that is attributed to it (see
    ``WaitAttribution``). ``block_seconds`` is the number of blocks it held while they waited,
    integrated over time.
    """

    id: int
    seconds: float
    block_seconds: float


#: Reasons of preemptions as phrases.
PREEMPTION_LABELS = {
    "blocks": "because the KV cache was full",
    "bucket": "because another bucket of lengths was running",
    "patience": "because the head of the queue waited too long",
}


class Preemption(NamedTuple):
    """Preemption of ``victim`` at ``at`` (s), in favor of request ``by`` (None: no single request).

    ``why`` is ``blocks`` (too few blocks), ``bucket`` (another bucket of requests runs) or
    ``patience`` (the head of the queue had waited too long). ``tokens`` is the number of tokens
    whose KV was lost.
    """

    at: float
    victim: int
    by: int | None
    why: str
    tokens: int


class Overtake(NamedTuple):
    """Overtaking of ``victim`` by ``others`` requests that arrived later but started earlier.

    ``by`` is the overtaking request that started first. ``seconds`` is the time between the start
    of ``by`` and the start of ``victim``. If ``victim`` never started, its end counts as its start.
    """

    victim: int
    by: int
    seconds: float
    others: int


class WastedTime(NamedTuple):
    """GPU time without benefit, in seconds; the time of a step is divided among its tokens.

    ``gone`` was spent on requests that had already ended, ``dropped`` on tokens that were computed
    and discarded, and ``recompute`` on tokens that had been computed before. ``busy`` is the total
    time of all steps, for comparison.
    """

    gone: float
    dropped: float
    recompute: float
    busy: float

    @property
    def total(self) -> float:
        """Total wasted GPU time in seconds."""
        return self.gone + self.dropped + self.recompute


def find_block_holdings(
    record: RunRecord, life: RequestRecord, block_size: int
) -> list[BlockHolding]:
    """Return the number of KV blocks of a request over time, computed from its tokens.

    The holdings are ordered by time and do not overlap; adjacent ones differ in their number of
    blocks. Blocks of shared prefixes count in full. Blocks that the engine allocated before use do
    not count. A request that is stalled or cut off holds its blocks until the end of the run.
    ``block_size`` is in tokens.
    """
    changes = _changes(record, life, block_size, list(compute_runs(life)))
    return [BlockHolding(*holding) for holding in _held(changes, record.end)]


def _changes(
    record: RunRecord, life: RequestRecord, block_size: int, computed: Sequence[ComputeRun]
) -> list[tuple[float, int]]:
    """Return pairs of a time (s) and the number of blocks that a request holds from then on.

    ``computed`` are the runs of the request (``compute_runs``).
    """
    decided = record.steps.decided
    found: list[tuple[float, int]] = []
    before = None
    for run in computed:
        if before and (at := kv_lost_at(life, before.last, run.first)) < inf:
            found.append((at, 0))
        found.append((decided[run.first], blocks_for(run.context + run.tokens, block_size)))
        ahead = -run.context % block_size or block_size  # rows until the next block
        blocks = (run.context + ahead) // block_size
        for row in range(run.first + ahead, run.last + 1, block_size):
            blocks += 1
            found.append((decided[row], blocks))
        before = run
    if before:
        at = kv_lost_at(life, before.last, None)
        keeps = life.outcome in (Outcome.STALLED, Outcome.CUT_OFF)
        found.append((at if at < inf or keeps else record.steps.end[before.last], 0))
    return found


def _held(changes: Iterable[tuple[float, int]], end: float) -> Iterator[tuple[float, float, int]]:
    since, held = 0.0, 0
    for at, blocks in chain(changes, [(end, 0)]):
        if blocks == held:
            continue
        until = at if at < end else end
        if held and until > since:
            yield since, until, held
        since, held = until, blocks


#: Ledger kinds by the resource that the request waits for: blocks, a slot, an adapter slot, or
#: steps in which others compute. Requests behind the head of the queue wait for the head's
#: resource.
_BLOCKS = frozenset({LedgerKind.BLOCKS, LedgerKind.RESERVED})
_SLOT = frozenset({LedgerKind.SLOT})
_ADAPTER = frozenset({LedgerKind.ADAPTER})
_STEPS = frozenset({LedgerKind.BUDGET, LedgerKind.RULE, LedgerKind.DEFERRED, LedgerKind.HELD_UP})
_HEAD = frozenset({LedgerKind.BEHIND})
_PREEMPTED = frozenset({LedgerKind.PREEMPTED})


class WaitAttribution:
    """Attribution of waiting time to the requests that hold the resource waited for.

    - Waiting for blocks is divided among the holders of blocks in proportion to their number.
    - Waiting for a slot is divided equally among the holders of slots.
    - Waiting for an adapter slot is divided equally among requests with a LoRA adapter that hold
      blocks.
    - Waiting for steps of other requests is divided in proportion to the tokens computed in them.

    Requests behind the head of the queue wait for the same resource as the head. A preempted
    request waits for blocks, unless the head waits for a slot or an adapter slot.
    """

    def __init__(
        self, record: RunRecord, ledger: Mapping[int, Sequence[LedgerSegment]], block_size: int
    ) -> None:
        self._ledger = ledger
        log = record.steps
        held, computed = _columns(), _columns()
        for i, life in record.requests.items():
            stretches = list(compute_runs(life))
            for run in stretches:
                computed.add(i, log.start[run.first], log.end[run.last], run.tokens)
            for start, end, blocks in _held(
                _changes(record, life, block_size, stretches), record.end
            ):
                held.add(i, start, end, blocks)
        waits = [(tile.start, tile.end) for tiles in ledger.values() for tile in tiles]
        heads = np.array([at for at, _ in record.queue_heads], dtype=np.float64)
        whys = np.array(["", *(held.why if held else "" for _, held in record.queue_heads)])
        edges = [np.array(column) for c in (held, computed) for column in (c.start, c.end)]
        times: Floats = np.sort(np.concatenate([*edges, heads, np.ravel(waits)]))
        # np.unique is not used because it imports many modules
        self._times = times[np.diff(times, prepend=-np.inf) > 0]
        self._seconds = np.diff(self._times)
        self._blocks = _Shares(held, self._times)
        self._slots = _Shares(held._replace(amount=array("q", [1]) * len(held.id)), self._times)
        asks = np.array([record.requests[i].request.lora is not None for i in held.id], np.int64)
        self._adapters = _Shares(held._replace(amount=array("q", asks)), self._times)
        self._tokens = _Shares(computed, self._times)
        why = whys[np.searchsorted(heads, self._times[:-1], side="right")]
        self._head_wants_blocks = np.isin(why, ["blocks", "reserved"])
        self._head_wants_slot = why == "slot"
        self._head_wants_adapter = why == "adapter"

    def on(self, request: int) -> list[Blocker]:
        """Return the requests that blocked ``request``, the longest blocking time first."""
        return self._share(self._ledger.get(request, []), request)

    def on_all(self, requests: Iterable[int]) -> list[Blocker]:
        """Return the requests that blocked any of ``requests``, the longest blocking time first.

        The result can include members of ``requests``.
        """
        return self._share([tile for i in requests for tile in self._ledger.get(i, [])], None)

    def block_holders(self, at: float) -> dict[int, int]:
        """Return the number of KV blocks held by each request just before the time ``at`` (s)."""
        return self._blocks.at(int(np.searchsorted(self._times, at)))

    def _share(self, tiles: Sequence[LedgerSegment], own: int | None) -> list[Blocker]:
        """Divide the waiting time in ``tiles`` among all requests except ``own``."""
        behind, preempted = self._count(tiles, _HEAD), self._count(tiles, _PREEMPTED)
        wants_blocks, wants_slot = self._head_wants_blocks, self._head_wants_slot
        wants_adapter = self._head_wants_adapter
        wants_steps = ~(wants_blocks | wants_slot | wants_adapter)
        for_blocks = self._count(tiles, _BLOCKS) + behind * wants_blocks
        for_blocks += preempted * ~(wants_slot | wants_adapter)
        for_slot = self._count(tiles, _SLOT) + (behind + preempted) * wants_slot
        for_adapter = self._count(tiles, _ADAPTER) + (behind + preempted) * wants_adapter
        for_steps = self._count(tiles, _STEPS) + behind * wants_steps
        waited = (for_blocks + for_slot + for_adapter + for_steps > 0) * self._seconds
        found: dict[int, float] = {}
        for shares, waiting in (
            (self._blocks, for_blocks),
            (self._slots, for_slot),
            (self._adapters, for_adapter),
            (self._tokens, for_steps),
        ):
            for i, seconds in shares.of(waiting * self._seconds, own):
                found[i] = found.get(i, 0.0) + seconds
        held = dict(self._blocks.sums(waited))
        blockers = [
            Blocker(i, seconds, held.get(i, 0.0))
            for i, seconds in found.items()
            if seconds > NEGLIGIBLE and i != own
        ]
        return sorted(blockers, key=lambda blocker: (-round(blocker.seconds, 9), blocker.id))

    def _count(self, tiles: Sequence[LedgerSegment], kinds: frozenset[LedgerKind]) -> Floats:
        """Return the number of segments of these kinds in each interval between ``_times``."""
        chosen = [(tile.start, tile.end) for tile in tiles if tile.kind in kinds]
        if not chosen:
            return np.zeros(len(self._seconds))
        start, end = np.searchsorted(self._times, np.array(chosen).T)
        return _over_time(len(self._times), start, end, np.ones(len(start)))


class _Columns(NamedTuple):
    """Columns of a table of resources held.

    Request ``id`` has ``amount`` of a resource from ``start`` to ``end`` (s).
    """

    id: array[int]
    start: array[float]
    end: array[float]
    amount: array[int]

    def add(self, i: int, start: float, end: float, amount: int) -> None:
        """Append a row to the table."""
        self.id.append(i)
        self.start.append(start)
        self.end.append(end)
        self.amount.append(amount)


def _columns() -> _Columns:
    return _Columns(array("q"), array("d"), array("d"), array("q"))


class _Shares:
    """Amount of a resource held by each request over time.

    ``times`` must contain all times at which an amount changes.
    """

    def __init__(self, rows: _Columns, times: Floats) -> None:
        self._ids, self._place = np.unique(np.array(rows.id), return_inverse=True)
        self._start = np.searchsorted(times, np.array(rows.start))
        self._end = np.searchsorted(times, np.array(rows.end))
        self._amount = np.array(rows.amount, dtype=np.float64)
        self._size = len(times)
        self._all = _over_time(self._size, self._start, self._end, self._amount)

    def of(self, seconds: Floats, own: int | None) -> list[tuple[int, float]]:
        """Divide ``seconds`` among all requests except ``own``, in proportion to their amounts.

        ``seconds`` has one value per interval between consecutive times.
        """
        total = self._all
        mine = self._ids[self._place] == own
        if mine.any():
            start, end, amount = self._start[mine], self._end[mine], self._amount[mine]
            total = total - _over_time(self._size, start, end, amount)
        return self.sums(np.divide(seconds, total, out=np.zeros_like(seconds), where=total > 0.5))

    def sums(self, weight: Floats) -> list[tuple[int, float]]:
        """Return, for each request, the sum over intervals of its amount times ``weight``."""
        upto = np.concatenate([[0.0], np.cumsum(weight)])
        amount = self._amount * (upto[self._end] - upto[self._start])
        sums = np.bincount(self._place, amount, len(self._ids))
        return list(zip(self._ids.tolist(), sums.tolist(), strict=True))

    def at(self, place: int) -> dict[int, int]:
        """Return the amount of each request just before the time with index ``place``."""
        here = (self._start < place) & (self._end >= place)
        amount = self._amount[here].astype(int)
        return dict(zip(self._ids[self._place[here]].tolist(), amount.tolist(), strict=True))


def _over_time(size: int, start: Ints, end: Ints, amount: Floats) -> Floats:
    """Return the total amount in each interval between consecutive times.

    ``start`` and ``end`` are indices of times between which ``amount`` is held.
    """
    change = np.zeros(size)
    np.add.at(change, start, amount)
    np.subtract.at(change, end, amount)
    return np.cumsum(change)[:-1]


def find_preemptions(record: RunRecord) -> list[Preemption]:
    """Return all preemptions in which a request lost computed KV, ordered by time."""
    found = []
    for i, life in record.requests.items():
        if not life.preempted_at:
            continue
        computed = list(compute_runs(life))
        firsts = [run.first for run in computed]
        taken = zip(life.preempted_at, life.preempted_rows, life.causes, strict=True)
        for at, row, cause in taken:
            index = bisect_left(firsts, row) - 1
            tokens = 0
            if index >= 0:
                run = computed[index]
                tokens = run.context + run.tokens * (min(row, run.last + 1) - run.first)
            found.append(Preemption(at, i, cause.by, cause.why, tokens))
    return sorted(found, key=lambda preemption: preemption.at)


def find_overtakes(record: RunRecord) -> list[Overtake]:
    """Return one entry per overtaken request, the longest time first."""
    starts = record.steps.start
    later: list[tuple[float, int]] = []
    found: list[Overtake] = []
    in_order = sorted(record.requests.values(), key=lambda life: -life.request.arrival)
    for _, group in groupby(in_order, key=lambda life: life.request.arrival):
        lives = list(group)
        for life in lives:
            end = record.end if life.ended_at is None else life.ended_at
            served = starts[life.segments[0].first] if life.segments else end
            if others := bisect_left(later, (served, -1)):
                first, by = later[0]
                found.append(Overtake(life.request.id, by, served - first, others))
        for life in lives:
            if life.segments:
                insort(later, (starts[life.segments[0].first], life.request.id))
    return sorted(found, key=lambda overtake: (-overtake.seconds, overtake.victim))


def compute_wasted_time(record: RunRecord) -> WastedTime:
    """Return the wasted GPU time of a run. Time counted as ``gone`` is not counted elsewhere."""
    log = record.steps
    tokens = [a + b for a, b in zip(log.prefill_tokens, log.decode_seqs, strict=True)]
    rows = zip(log.start, log.end, tokens, strict=True)
    per_token = [(end - start) / max(n, 1) for start, end, n in rows]
    upto = list(accumulate(per_token, initial=0.0))
    gone, dropped, again = [], [], []
    for life in record.requests.values():
        # Rows that began after the end of the request.
        end = inf if life.ended_at is None else life.ended_at
        after = bisect_left(log.start, end - NEGLIGIBLE)
        for run in compute_runs(life):
            stop = max(run.first, min(after, run.last + 1))
            gone.append(run.tokens * (upto[run.last + 1] - upto[stop]))
            if run.kind is LedgerKind.DECODE:
                again.append(upto[min(run.first + run.recomputed, stop)] - upto[run.first])
            elif stop > run.first:
                again.append(run.recomputed * per_token[run.first])
        dropped += [per_token[row] for row in life.dropped_rows if row < after]
    busy = fsum(end - start for start, end in zip(log.start, log.end, strict=True))
    return WastedTime(fsum(gone), fsum(dropped), fsum(again), busy)
