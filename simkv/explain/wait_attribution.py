"""Attribution of waiting time to the requests that held the resources."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from math import inf
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from simkv.core.outcome import Outcome
from simkv.core.scheduler_protocol import blocks_for
from simkv.explain.computed_runs import ComputeRun, Ints, RunTable, compute_runs, kv_lost_at
from simkv.explain.ledger_kinds import NEGLIGIBLE, LedgerKind, LedgerSegment
from simkv.sim.run_record import RequestRecord, RunRecord

Floats = npt.NDArray[np.float64]


#: Outcomes of requests that hold their blocks until the end of the run.
KEEPS_BLOCKS = (Outcome.STALLED, Outcome.CUT_OFF)


class BlockHolding(NamedTuple):
    """A number of KV blocks (``blocks``) that a request held from ``start`` to ``end`` (s)."""

    start: float
    end: float
    blocks: int


class Blocker(NamedTuple):
    """A request that held a resource for which other requests waited.

    ``seconds`` is the waiting time of other requests that is attributed to the request (see
    ``WaitAttribution``). ``block_seconds`` is the time integral of the number of blocks that the
    request held while the others waited.
    """

    id: int
    seconds: float
    block_seconds: float


def find_block_holdings(
    record: RunRecord, life: RequestRecord, block_size: int
) -> list[BlockHolding]:
    """Return the number of KV blocks that a request holds over time, in order.

    The number is computed from the tokens of the request, without blocks allocated in advance.
    Blocks of shared prefixes count for each request. ``block_size`` is in tokens.
    """
    changes = _changes(record, life, block_size, list(compute_runs(life)))
    return [BlockHolding(*holding) for holding in _held(changes, record.end)]


def _changes(
    record: RunRecord, life: RequestRecord, block_size: int, computed: Sequence[ComputeRun]
) -> list[tuple[float, int]]:
    """Return pairs of a time (s) and the number of blocks that a request holds from then on.

    ``computed`` is the result of ``compute_runs``.
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
        keeps = life.outcome in KEEPS_BLOCKS
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
#: steps in which other requests compute. Requests behind the head of the queue wait for the
#: resource that the head waits for.
_BLOCKS = frozenset({LedgerKind.BLOCKS, LedgerKind.RESERVED})
_SLOT = frozenset({LedgerKind.SLOT})
_ADAPTER = frozenset({LedgerKind.ADAPTER})
_STEPS = frozenset({LedgerKind.BUDGET, LedgerKind.RULE, LedgerKind.DEFERRED, LedgerKind.HELD_UP})
_HEAD = frozenset({LedgerKind.BEHIND})
_PREEMPTED = frozenset({LedgerKind.PREEMPTED})


class WaitAttribution:
    """Attribution of waiting time to the requests that hold the resources.

    - Waiting for blocks is divided among the holders of blocks in proportion to their blocks.
    - Waiting for a slot is divided equally among the holders of slots.
    - Waiting for an adapter slot is divided equally among running requests with a LoRA adapter.
    - Waiting for steps of other requests is divided in proportion to the tokens that each request
      computes in the steps.

    Requests behind the head of the queue wait for the same resource as the head. A preempted
    request waits for blocks, unless the head waits for a slot or an adapter slot.
    """

    def __init__(
        self,
        record: RunRecord,
        ledger: Mapping[int, Sequence[LedgerSegment]],
        block_size: int,
        table: RunTable,
    ) -> None:
        self._ledger = ledger
        ids = np.array(list(record.requests), dtype=np.int64)
        starts, ends = np.array(record.steps.start), np.array(record.steps.end)
        held = _tabulate_holdings(record, table, block_size)
        computed = _Held(table.owner, starts[table.first], ends[table.last], table.tokens)
        waits = [tile.end for tiles in ledger.values() for tile in tiles]
        waits += [tiles[0].start for tiles in ledger.values() if tiles]
        heads = np.array([at for at, _ in record.queue_heads], dtype=np.float64)
        whys = np.array(["", *(held.why if held else "" for _, held in record.queue_heads)])
        edges = [held.start, held.end, computed.start, computed.end, heads, np.array(waits)]
        times: Floats = np.sort(np.concatenate(edges))
        # np.unique is not used, because it imports many modules
        self._times = times[np.diff(times, prepend=-np.inf) > 0]
        self._seconds = np.diff(self._times)
        self._blocks = _Shares.of_rows(held, self._times, ids)
        self._slots = self._blocks.with_amounts(np.ones(len(held.owner)))
        lora = [life.request.lora is not None for life in record.requests.values()]
        self._adapters = self._blocks.with_amounts(np.array(lora, dtype=np.float64)[held.owner])
        self._tokens = _Shares.of_rows(computed, self._times, ids)
        why = whys[np.searchsorted(heads, self._times[:-1], side="right")]
        self._head_wants_blocks = np.isin(why, ["blocks", "reserved"])
        self._head_wants_slot = why == "slot"
        self._head_wants_adapter = why == "adapter"

    def on(self, request: int) -> list[Blocker]:
        """Return the requests that blocked ``request``, the longest blocking time first."""
        return self._share(self._ledger.get(request, []), request)

    def on_all(self, requests: Iterable[int]) -> list[Blocker]:
        """Return the requests that blocked any of ``requests``, the longest blocking time first."""
        return self._share([tile for i in requests for tile in self._ledger.get(i, [])], None)

    def block_holders(self, at: float) -> dict[int, int]:
        """Return the number of KV blocks held by each request just before the time ``at`` (s)."""
        return self._blocks.at(int(np.searchsorted(self._times, at)))

    def _share(self, tiles: Sequence[LedgerSegment], own: int | None) -> list[Blocker]:
        """Divide the waiting time of the intervals ``tiles`` among all requests except ``own``."""
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
        """Return the number of waits of the given kinds in each interval between ``_times``."""
        chosen = [(tile.start, tile.end) for tile in tiles if tile.kind in kinds]
        if not chosen:
            return np.zeros(len(self._seconds))
        start, end = np.searchsorted(self._times, np.array(chosen).T)
        return _over_time(len(self._times), start, end, np.ones(len(start)))


class _Held(NamedTuple):
    """Table of the resources that requests hold, as columns.

    The request at position ``owner`` of the record holds ``amount`` units from ``start`` to ``end``
    (s).
    """

    owner: Ints
    start: Floats
    end: Floats
    amount: Ints


def _tabulate_holdings(record: RunRecord, table: RunTable, block_size: int) -> _Held:
    """Return the blocks held by all requests, as in ``find_block_holdings``."""
    lives = list(record.requests.values())
    disturbed = np.array([bool(life.preempted_rows) for life in lives], dtype=bool)
    found = [_hold_undisturbed(record, table.select(~disturbed[table.owner]), block_size)]
    for owner in np.flatnonzero(disturbed).tolist():
        held = find_block_holdings(record, lives[owner], block_size)
        if held:
            start, end, blocks = (np.array(column) for column in zip(*held, strict=True))
            found.append(_Held(np.full(len(held), owner), start, end, blocks))
    return _Held(*(np.concatenate(columns) for columns in zip(*found, strict=True)))


def _hold_undisturbed(record: RunRecord, table: RunTable, block_size: int) -> _Held:
    """Return the blocks held by requests that were never preempted.

    Blocks are allocated when a step is scheduled. All blocks are freed after the last step of the
    request.
    """
    decided, ends = np.array(record.steps.decided), np.array(record.steps.end)
    ahead = -table.context % block_size
    ahead = np.where(ahead, ahead, block_size)  # rows until the next block
    grown = np.maximum((table.last - table.first - ahead) // block_size + 1, 0)
    final = np.ones(len(table.owner), dtype=bool)
    final[:-1] = table.owner[1:] != table.owner[:-1]
    sizes = 1 + grown + final
    offset = np.cumsum(sizes) - sizes
    run = np.repeat(np.arange(len(sizes)), sizes)
    nth = np.arange(len(run)) - offset[run]
    row = np.where(nth, table.first[run] + ahead[run] + (nth - 1) * block_size, table.first[run])
    at = decided[np.minimum(row, table.last[run])]
    full = (table.context + ahead) // block_size
    blocks = np.where(nth, full[run] + nth, -(-(table.context + table.tokens) // block_size)[run])
    closing = final[run] & (nth == sizes[run] - 1)
    keeps = np.array(
        [life.outcome in KEEPS_BLOCKS for life in record.requests.values()], dtype=bool
    )
    until = np.where(keeps[table.owner], record.end, ends[table.last])
    at[closing], blocks[closing] = until[run[closing]], 0
    return _to_holdings(table.owner[run], np.minimum(at, record.end), blocks)


def _to_holdings(owner: Ints, at: Floats, blocks: Ints) -> _Held:
    """Return the intervals in which requests hold blocks.

    At the time ``at[i]`` (s), the request ``owner[i]`` begins to hold ``blocks[i]`` blocks. The
    last number of each request is 0.
    """
    before = np.concatenate([[0], blocks[:-1]])
    changed = blocks != before
    owner, at, blocks = owner[changed], at[changed], blocks[changed]
    start, end, held = at[:-1], at[1:], blocks[:-1]
    real = (held > 0) & (end > start)
    return _Held(owner[:-1][real], start[real], end[real], held[real])


class _Shares:
    """Amount of a resource that each request holds over time.

    ``owner`` is the position of a request in ``ids``. ``start`` and ``end`` are indices in a list
    of ``size`` times.
    """

    def __init__(
        self, owner: Ints, start: Ints, end: Ints, amount: Floats, size: int, ids: Ints
    ) -> None:
        self._owner, self._start, self._end, self._amount = owner, start, end, amount
        self._size, self._ids = size, ids
        self._all = _over_time(size, start, end, amount)

    @classmethod
    def of_rows(cls, rows: _Held, times: Floats, ids: Ints) -> _Shares:
        """Return the amounts in the table ``rows``. ``times`` contains all times of changes."""
        start, end = np.searchsorted(times, rows.start), np.searchsorted(times, rows.end)
        return cls(rows.owner, start, end, rows.amount.astype(np.float64), len(times), ids)

    def with_amounts(self, amount: Floats) -> _Shares:
        """Return the same table with other amounts."""
        return _Shares(self._owner, self._start, self._end, amount, self._size, self._ids)

    def of(self, seconds: Floats, own: int | None) -> list[tuple[int, float]]:
        """Divide ``seconds`` among all requests except ``own``, in proportion to their amounts.

        ``seconds`` contains one value per interval between consecutive times.
        """
        total = self._all
        mine = self._ids[self._owner] == own
        if mine.any():
            start, end, amount = self._start[mine], self._end[mine], self._amount[mine]
            total = total - _over_time(self._size, start, end, amount)
        return self.sums(np.divide(seconds, total, out=np.zeros_like(seconds), where=total > 0.5))

    def sums(self, weight: Floats) -> list[tuple[int, float]]:
        """Return the sum of ``weight`` times the amount over all intervals, for each request."""
        upto = np.concatenate([[0.0], np.cumsum(weight)])
        amount = self._amount * (upto[self._end] - upto[self._start])
        sums = np.bincount(self._owner, amount, len(self._ids))
        return list(zip(self._ids.tolist(), sums.tolist(), strict=True))

    def at(self, place: int) -> dict[int, int]:
        """Return the amount of each request just before the time with index ``place``."""
        here = (self._start < place) & (self._end >= place)
        amount = self._amount[here].astype(int)
        return dict(zip(self._ids[self._owner[here]].tolist(), amount.tolist(), strict=True))


def _over_time(size: int, start: Ints, end: Ints, amount: Floats) -> Floats:
    """Return the total amount in each interval between consecutive times.

    ``amount[i]`` is held from the time with index ``start[i]`` to the time with index ``end[i]``.
    """
    change = np.zeros(size)
    np.add.at(change, start, amount)
    np.subtract.at(change, end, amount)
    return np.cumsum(change)[:-1]
