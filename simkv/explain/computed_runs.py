"""Runs of consecutive steps in which a request computed tokens, for one request or for all."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from math import inf
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from simkv.explain.ledger_kinds import LedgerKind
from simkv.sim.run_record import RequestRecord, RunRecord
from simkv.sim.segments import PREFILL, WIDTH

Ints = npt.NDArray[np.int64]

#: Kinds of runs by the code in ``RunTable.kind``.
RUN_KINDS = (LedgerKind.PREFILL, LedgerKind.RECOMPUTE, LedgerKind.DECODE)
DECODE_CODE = RUN_KINDS.index(LedgerKind.DECODE)


class ComputeRun(NamedTuple):
    """Run of consecutive steps in which a request computed tokens.

    ``first`` and ``last`` are the first and the last step, as row numbers of the step log.
    ``tokens`` is the number of tokens per step. ``context`` is the number of cached tokens before
    the first step. ``recomputed`` is the number of tokens in the run that had been computed before.
    A prefill run has only one step. With draft tokens, only one token per decode step counts.
    """

    kind: LedgerKind
    first: int
    last: int
    tokens: int
    context: int
    recomputed: int


def compute_runs(life: RequestRecord) -> Iterator[ComputeRun]:
    """Yield the runs of steps in which a request computed tokens, in order.

    Consecutive decode steps form one run.
    """
    chunks = {chunk.row: chunk for chunk in life.chunks}
    context = known = 0
    for segment in life.segments:
        whole = [(segment.first, segment.last)]
        if life.drafted and segment.kind == "decode":
            rows = [chunks[row] for row in range(segment.first, segment.last + 1)]
            yield ComputeRun(LedgerKind.DECODE, segment.first, segment.last, 1, rows[0].context, 0)
            known = max(known, *(row.context + row.tokens for row in rows))
            continue
        if segment.kind == "prefill":
            whole = [(row, row) for row in range(segment.first, segment.last + 1)]
        for first, last in whole:
            tokens = 1
            if chunk := chunks.get(first):
                tokens, context = chunk.tokens, chunk.context
            reached = context + tokens * (last - first + 1)
            again = max(min(known, reached) - context, 0)
            kind = LedgerKind.DECODE
            if segment.kind == "prefill":
                kind = LedgerKind.RECOMPUTE if 2 * again > tokens else LedgerKind.PREFILL
            yield ComputeRun(kind, first, last, tokens, context, again)
            context, known = reached, max(known, reached)


def kv_lost_at(life: RequestRecord, before: int, after: int | None) -> float:
    """Return the time (s) at which the request lost its KV between two runs, or infinity.

    ``before`` is the last step of a run, and ``after`` is the first step of the next run, or None.
    Both are row numbers of the step log.
    """
    index = bisect_right(life.preempted_rows, before)
    if index == len(life.preempted_rows):
        return inf
    if after is not None and life.preempted_rows[index] > after:
        return inf
    return life.preempted_at[index]


class RunTable(NamedTuple):
    """The runs of all requests as columns, ordered by request and time; see ``ComputeRun``.

    ``owner`` is the position of the request in ``RunRecord.requests``. ``kind`` is an index in
    ``RUN_KINDS``.
    """

    owner: Ints
    kind: Ints
    first: Ints
    last: Ints
    tokens: Ints
    context: Ints
    recomputed: Ints

    def bounds(self, owners: int) -> Ints:
        """Return, for each request, the index of its first run. The last value is the total number
        of runs.

        ``owners`` is the number of requests.
        """
        return np.searchsorted(self.owner, np.arange(owners + 1))

    def select(self, rows: npt.NDArray[np.bool_]) -> RunTable:
        """Return the table with only the rows of the mask."""
        return RunTable(*(column[rows] for column in self))


def tabulate_runs(record: RunRecord) -> RunTable:
    """Return the runs of all requests, as ``compute_runs`` does for one request."""
    lives = record.requests.values()
    if any(life.drafted for life in lives):
        return _tabulate(compute_runs(life) for life in lives)
    of_segment, segments = _join(life.segment_data for life in lives)
    what, begin, end = segments.T
    prefills = what & PREFILL > 0
    lengths = np.where(prefills, end - begin + 1, 1)
    segment = np.repeat(np.arange(len(what)), lengths)
    nth = np.arange(len(segment)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    first = begin[segment] + nth
    prefill = prefills[segment]
    last = np.where(prefill, first, end[segment])
    owner = of_segment[segment]
    tokens, context, reached = _follow_contexts(record, owner, first, last)
    known = _highest_before(reached, owner)
    recomputed = np.maximum(np.minimum(known, reached) - context, 0)
    kind = np.where(prefill, (2 * recomputed > tokens).astype(np.int64), DECODE_CODE)
    return RunTable(owner, kind, first, last, tokens, context, recomputed)


def _follow_contexts(
    record: RunRecord, owner: Ints, first: Ints, last: Ints
) -> tuple[Ints, Ints, Ints]:
    """Return the tokens per step of each run, and the cached tokens before and after the run.

    A run without a recorded chunk computes one token per step and continues the previous run.
    """
    of_chunk, chunks = _join(life.chunk_rows for life in record.requests.values())
    rows = len(record.steps) + 1
    keys = of_chunk * rows + chunks[:, 0]
    wanted = owner * rows + first
    place = np.minimum(np.searchsorted(keys, wanted), max(len(keys) - 1, 0))
    recorded = keys[place] == wanted if len(keys) else np.zeros(len(wanted), dtype=bool)
    tokens = np.ones(len(wanted), dtype=np.int64)
    context = np.zeros(len(wanted), dtype=np.int64)
    tokens[recorded] = chunks[place[recorded], 1]
    context[recorded] = chunks[place[recorded], 2]
    growth = tokens * (last - first + 1)
    before = np.cumsum(growth) - growth
    index = np.arange(len(wanted))
    start = np.searchsorted(owner, owner)
    anchor = np.maximum(np.maximum.accumulate(np.where(recorded, index, 0)), start)
    context = context[anchor] + before - before[anchor]
    return tokens, context, context + growth


def _highest_before(reached: Ints, owner: Ints) -> Ints:
    """Return the maximum of ``reached`` over the earlier runs of the same request, or 0."""
    if not len(reached):
        return reached
    offset = owner * (int(reached.max()) + 1)
    highest = np.maximum.accumulate(reached + offset)
    before = np.concatenate([[0], highest[:-1]])
    return np.maximum(before - offset, 0)


def _join(parts: Iterable[array[int]]) -> tuple[Ints, Ints]:
    """Combine arrays of groups of three integers. Return the array index of each group, and the
    groups.
    """
    joined, counts = array("i"), list[int]()
    for part in parts:
        joined.extend(part)
        counts.append(len(part) // WIDTH)
    rows = np.array(joined, dtype=np.int64).reshape(-1, WIDTH)
    return np.repeat(np.arange(len(counts)), np.array(counts, dtype=np.int64)), rows


def _tabulate(computed: Iterable[Iterable[ComputeRun]]) -> RunTable:
    code = {kind: index for index, kind in enumerate(RUN_KINDS)}
    rows: list[Sequence[int]] = [
        (owner, code[run.kind], *run[1:]) for owner, runs in enumerate(computed) for run in runs
    ]
    return RunTable(*np.array(rows, dtype=np.int64).reshape(-1, len(RunTable._fields)).T)
