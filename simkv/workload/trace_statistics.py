"""Statistics of a trace: rates, lengths, shared prefixes and KV demand."""
# The statistics are computed in one pass over the rows. Memory use does not grow with the number of
# rows, because only distinct blocks of shared prompts and requests in flight are stored.

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from simkv.core.grouped_quantile import quantile
from simkv.workload.request_columns import (
    HASH_STREAM,
    OUTPUT_STREAM,
    PROMPT_STREAM,
    Floats,
    Ints,
    RequestRows,
    is_sorted,
)
from simkv.workload.trace_reader import TraceReader, shift_to_zero

#: Maximum length that is counted in an array; larger lengths are counted in a dictionary.
MAX_ARRAY_LENGTH = 1 << 17
#: Number of time bins; the width of the bins doubles when a trace does not fit.
BINS = 1 << 17
#: Number of requests per point in the plot of shared tokens.
REQUESTS_PER_POINT = 64
QUANTILES = (0.5, 0.9, 0.99)


class ServiceTime(NamedTuple):
    """Assumed time for which a request holds its KV, for the estimate of peak demand.

    A prompt is computed at ``prefill_rate`` tokens per second. Each output token takes ``tpot``
    seconds.
    """

    # A request never waits. It holds the KV of prompt and output for the whole time, and no KV is
    # shared.

    prefill_rate: float = 10_000.0
    tpot: float = 0.03

    def seconds(self, prompts: Ints, outputs: Ints) -> Floats:
        return prompts / self.prefill_rate + outputs * self.tpot

    def __str__(self) -> str:
        return (
            f"prefill at {self.prefill_rate:,g} tokens/s, {1000 * self.tpot:g} ms per output "
            "token, no waiting, no prefix cache"
        )


class UnsortedTrace(Exception):
    """Raised if the rows are not in order of arrival."""


class LengthHistogram:
    """Number of requests by length."""

    def __init__(self) -> None:
        self._short = np.zeros(MAX_ARRAY_LENGTH, np.int64)
        self._long: dict[int, int] = {}

    def add(self, values: Ints) -> None:
        short = values < MAX_ARRAY_LENGTH
        self._short += np.bincount(values[short], minlength=MAX_ARRAY_LENGTH)
        for value in values[~short].tolist():
            self._long[value] = self._long.get(value, 0) + 1

    def counts(self) -> tuple[Ints, Ints]:
        """Return the distinct lengths in ascending order, and their counts."""
        short = np.flatnonzero(self._short)
        long = sorted(self._long)
        values = np.concatenate([short, np.array(long, np.int64)])
        counts = [self._short[short], np.array([self._long[v] for v in long], np.int64)]
        return values, np.concatenate(counts)

    def figures(self) -> dict[str, float]:
        """Return mean, P50, P90, P99 and maximum."""
        # Percentiles are interpolated linearly, as in numpy.
        values, counts = self.counts()
        total = int(counts.sum())
        figures = {"mean": float((values * counts).sum() / total)}
        lengths, ends = values.tolist(), np.cumsum(counts).tolist()
        for share in QUANTILES:
            figures[f"p{100 * share:g}"] = float(quantile(lengths, ends, share))
        figures["max"] = float(values[-1])
        return figures


class BinnedAmounts:
    """Sums of amounts by time bin."""

    # If a trace is longer than all bins together, the width of the bins is doubled.

    def __init__(self) -> None:
        self.width = 1.0
        self.values = np.zeros(BINS)

    def add(self, times: Floats, amounts: npt.NDArray[Any] | None = None) -> None:
        """Add ``amounts`` at ``times`` (s) to the bins. The default amount is 1."""
        if not len(times):
            return
        last = float(times.max())
        while last >= BINS * self.width:
            folded = self.values.reshape(-1, 2).sum(axis=1)
            self.values = np.concatenate([folded, np.zeros(BINS - len(folded))])
            self.width *= 2
        self.values += np.bincount((times / self.width).astype(np.int64), amounts, minlength=BINS)

    def most(self, width: float) -> float:
        """Return the largest sum in any of the time spans [0, width), [width, 2 width) and
        so on.
        """
        bins = max(round(width / self.width), 1)
        padded = np.pad(self.values, (0, -len(self.values) % bins))
        return float(padded.reshape(-1, bins).sum(axis=1).max())


class PrefixSharing:
    """Counter of leading prompt tokens that also occur in earlier prompts.

    The number of these tokens, divided by the number of all prompt tokens, is the hit rate of an
    unlimited cache.
    """

    # The pieces of prompts are stored in a trie; the common prefix of two prompts ends where their
    # pieces differ.

    def __init__(self) -> None:
        self._nodes: dict[tuple[int, int, int, int, int], int] = {}
        self._reach: dict[tuple[int, int, int, int], int] = {}
        self._hashes: set[int] = set()
        self.hash_blocks = self.hash_hits = 0
        self.tokens = self.hit_tokens = 0
        self.known = False

    def add(self, rows: RequestRows) -> Ints:
        """Add prompts. Return the number of leading tokens of each prompt that occurred in earlier
        prompts.
        """
        if rows.pieces is None:
            self.tokens += int(rows.prompt_tokens.sum())
            return np.zeros(len(rows), np.int64)
        self.known = True
        shared = []
        for pieces, prompt, output, number in zip(
            rows.pieces.by_row(),
            rows.prompt_tokens.tolist(),
            rows.output_tokens.tolist(),
            rows.column("number").tolist(),
            strict=True,
        ):
            self._count_hashes(pieces)
            rest = prompt - sum(end - start for *_, start, end in pieces)
            content = [*pieces, (PROMPT_STREAM, number, 0, rest)] if rest else pieces
            common = self._walk(content, (OUTPUT_STREAM, number, 0, output))
            shared.append(common)
            self.tokens += prompt
            self.hit_tokens += common
        return np.array(shared, np.int64)

    def _count_hashes(self, pieces: list[tuple[int, int, int, int]]) -> None:
        """Count the blocks with hash ids, and the leading blocks that occurred before."""
        ids = [value for kind, value, *_ in pieces if kind == HASH_STREAM]
        self.hash_blocks += len(ids)
        for value in ids:
            if value not in self._hashes:
                break
            self.hash_hits += 1
        self._hashes.update(ids)

    def _walk(
        self, pieces: list[tuple[int, int, int, int]], output: tuple[int, int, int, int]
    ) -> int:
        """Add a prompt and its output. Return the number of leading tokens that occurred before."""
        node, shared, same = 0, 0, True
        for index, (kind, value, start, end) in enumerate(_merged([*pieces, output])):
            place = (node, kind, value, start)
            name = (*place, end)
            reach = self._reach.get(place, start)
            if same and index < len(pieces):
                shared += min(reach, end) - start
            same = same and name in self._nodes
            if reach < end:
                self._reach[place] = end
            node = self._nodes.setdefault(name, len(self._nodes) + 1)
        return shared


def _merged(pieces: list[tuple[int, int, int, int]]) -> list[tuple[int, int, int, int]]:
    """Merge adjacent pieces that are contiguous in the same stream."""
    merged = pieces[:1]
    for kind, value, start, end in pieces[1:]:
        last = merged[-1]
        if last[:2] == (kind, value) and last[3] == start:
            merged[-1] = (kind, value, last[2], end)
        else:
            merged.append((kind, value, start, end))
    return merged


class PeakDemand:
    """Peak numbers of requests in flight and of their KV blocks."""

    # The peaks are computed from all arrivals and departures in order of time.

    def __init__(self, service: ServiceTime, block_size: int) -> None:
        self.service = service
        self.block_size = block_size
        self.requests = self.blocks = 0
        self.held = BinnedAmounts()
        self._ends = np.zeros(0)
        self._blocks = np.zeros(0, np.int64)

    def add(self, rows: RequestRows) -> None:
        tokens = rows.prompt_tokens + rows.output_tokens - 1  # the last token has no KV
        blocks = -(-tokens // self.block_size)
        ends = rows.arrival + self.service.seconds(rows.prompt_tokens, rows.output_tokens)
        self.held.add(rows.arrival, blocks)
        self.held.add(ends, -blocks)
        all_ends = np.concatenate([self._ends, ends])
        all_blocks = np.concatenate([self._blocks, blocks])
        over = all_ends <= rows.arrival[-1]
        # at equal times, departures precede arrivals
        times = np.concatenate([all_ends[over], rows.arrival])
        order = np.argsort(times, kind="stable")
        for name, before, gone, come in (
            ("blocks", self._blocks.sum(), all_blocks[over], blocks),
            ("requests", len(self._blocks), np.ones(over.sum(), np.int64), np.ones_like(blocks)),
        ):
            level = before + np.cumsum(np.concatenate([-gone, come])[order])
            setattr(self, name, max(getattr(self, name), int(level.max())))
        self._ends, self._blocks = all_ends[~over], all_blocks[~over]


@dataclass
class TraceStatistics:
    """Statistics of a trace, collected in one pass."""

    service: ServiceTime = field(default_factory=ServiceTime)
    block_size: int = 16

    def __post_init__(self) -> None:
        self.requests = 0
        self.first = self.last = math.nan
        self.prompts, self.outputs = LengthHistogram(), LengthHistogram()
        self.arrivals, self.sharing = BinnedAmounts(), PrefixSharing()
        self.demand = PeakDemand(self.service, self.block_size)
        self.sessions: set[int] = set()
        self.longest_gap = 0.0
        self.full_blocks = self.full_hits = 0
        self.shared_course: list[tuple[int, float]] = []
        self._squares = 0.0

    def add(self, rows: RequestRows) -> None:
        """Add the next rows. Raises UnsortedTrace if a row arrives before an earlier one."""
        self.prompts.add(rows.prompt_tokens)
        self.outputs.add(rows.output_tokens)
        self.requests += len(rows)
        if rows.session is not None:
            self.sessions.update(np.unique(rows.session).tolist())
        shared = self.sharing.add(rows)
        self.full_blocks += int((rows.prompt_tokens // self.block_size).sum())
        self.full_hits += int((shared // self.block_size).sum())
        self._note_sharing(rows, shared)
        if np.isnan(rows.arrival[0]):
            return
        if not is_sorted(rows.arrival) or rows.arrival[0] < 0 or rows.arrival[0] < self.last:
            raise UnsortedTrace
        before = rows.arrival[0] if math.isnan(self.last) else self.last
        gaps = np.diff(rows.arrival, prepend=before)
        self.first = rows.arrival[0] if math.isnan(self.first) else self.first
        self.last = float(rows.arrival[-1])
        self._squares += float((gaps * gaps).sum())
        self.longest_gap = max(self.longest_gap, float(gaps.max()))
        self.arrivals.add(rows.arrival)
        self.demand.add(rows)

    def _note_sharing(self, rows: RequestRows, shared: Ints) -> None:
        """Record the fraction of repeated prompt tokens at some rows, for the plot."""
        marks = np.arange(len(rows) - 1, -1, -REQUESTS_PER_POINT)[::-1]
        tokens = self.sharing.tokens - rows.prompt_tokens.sum() + np.cumsum(rows.prompt_tokens)
        hits = self.sharing.hit_tokens - shared.sum() + np.cumsum(shared)
        done = self.requests - len(rows) + 1 + marks
        self.shared_course += zip(
            done.tolist(), (hits[marks] / tokens[marks]).tolist(), strict=True
        )

    @property
    def span(self) -> float:
        """Seconds from the first to the last arrival; NaN without arrivals."""
        return self.last - self.first

    def figures(self) -> dict[str, Any]:
        """Return all statistics by name, with None for missing data.

        ``rate`` is the number of requests per second. ``gap_cv`` is the coefficient of variation of
        the gaps between arrivals.
        """
        # The rate is that between the first and the last arrival.
        timed = self.span > 0
        gaps = self.requests - 1
        mean = self.span / gaps if timed else math.nan
        variance = max(self._squares / gaps - mean * mean, 0.0) if timed else math.nan
        sharing = self.sharing
        prompts, outputs = self.prompts.figures(), self.outputs.figures()
        return {
            "requests": self.requests,
            "sessions": len(self.sessions - {-1}) or None,
            "span_s": self.span if timed else None,
            "rate": self.requests / self.span if timed else None,
            "gap_cv": math.sqrt(variance) / mean if timed else None,
            "longest_gap_s": self.longest_gap if timed else None,
            "most_in_1_s": self.arrivals.most(1.0)
            if timed and self.arrivals.width == 1.0
            else None,
            "most_in_64_s": self.arrivals.most(64.0) if timed else None,
            "prompt_tokens": prompts,
            "output_tokens": outputs,
            "total_tokens": round((prompts["mean"] + outputs["mean"]) * self.requests),
            "hash_blocks": sharing.hash_blocks or None,
            "hash_block_hits": sharing.hash_hits if sharing.hash_blocks else None,
            "prefix_hit_rate": sharing.hit_tokens / sharing.tokens if sharing.known else None,
            "full_blocks": self.full_blocks,
            "full_block_hits": self.full_hits if sharing.known else None,
            "block_size": self.block_size,
            "peak_requests": self.demand.requests or None,
            "peak_blocks": self.demand.blocks or None,
            "assuming": str(self.service),
        }


def inspect_trace(
    reader: TraceReader, service: ServiceTime | None = None, block_size: int = 16
) -> TraceStatistics:
    """Return the statistics of a trace. Raises InputError if the trace is empty."""
    # The trace is read in one pass, or sorted in memory if it is unordered.
    survey = TraceStatistics(service or ServiceTime(), block_size)
    try:
        _take(survey, reader)
    except UnsortedTrace:
        survey = TraceStatistics(survey.service, block_size)
        _take(survey, [shift_to_zero(RequestRows.concat(list(reader)).by_arrival())])
    if not survey.requests:
        raise reader.no_rows_error()
    return survey


def _take(survey: TraceStatistics, parts: Iterable[RequestRows]) -> None:
    for rows in parts:
        survey.add(rows)
