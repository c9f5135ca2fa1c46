"""Verdict: the head of the queue waits for KV blocks and blocks requests that would fit."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NamedTuple

from simkv.core.scheduler_protocol import blocks_for
from simkv.explain.ledger_kinds import Ledger, LedgerKind
from simkv.explain.verdicts.verdict import Verdict
from simkv.sim.run_record import RunRecord, emitting_rows

#: Minimum fraction of the run during which the head must block a request that would fit.
MIN_BLOCKED_SHARE = 0.05


@dataclass(frozen=True)
class HeadOfLineBlocking(Verdict):
    """The head of the queue waited for blocks while a request behind it would have fit.

    ``seconds`` is the total time. ``requests`` contains the head, and the request behind it that
    waited longest. This request waited for ``longest`` seconds. The head needed ``needs`` blocks,
    the other request needed ``other_needs`` blocks, and ``free`` blocks were free.
    """

    name = "head-of-line blocking"
    seconds: float
    longest: float
    needs: int
    free: int
    other_needs: int

    @property
    def text(self) -> str:
        head, other = self.requests
        return (
            f"for {self.seconds:.3f} s, the head of the queue blocked requests that would have "
            f"fit: request {head} needs {self.needs} blocks, but {self.free} were free; request "
            f"{other} behind it needs only {self.other_needs}, and waited {self.longest:.3f} s"
        )


class _Behind(NamedTuple):
    """A request behind the head from ``start`` to ``end`` (s). It needs ``needs`` blocks."""

    needs: int
    id: int
    start: float
    end: float


def find_head_of_line_blocking(
    record: RunRecord, ledger: Ledger, block_size: int
) -> HeadOfLineBlocking | None:
    """Return the verdict on head-of-line blocking, or None.

    There is no verdict if requests were blocked for less than the fraction ``MIN_BLOCKED_SHARE`` of
    the run. ``block_size`` is in tokens.
    """
    queue = sorted(
        (
            _Behind(blocks_for(life.request.prompt_tokens + 1, block_size), i, tile.start, tile.end)
            for i, life in record.requests.items()
            for tile in ledger[i]
            if tile.kind is LedgerKind.BEHIND
        ),
        key=lambda behind: behind.start,
    )
    come = 0
    waiting: list[_Behind] = []
    seconds = longest = 0.0
    proof = (-1, -1, 0, 0, 0)
    for head, start, end in _heads_without_blocks(record):
        while come < len(queue) and queue[come].start < end:
            heappush(waiting, queue[come])
            come += 1
        while waiting and waiting[0].end <= start:
            heappop(waiting)
        free = _least_free(record, start, end)
        if not waiting or waiting[0].needs > free:
            continue
        other = waiting[0]
        needs = blocks_for(_known(record, head, start) + 1, block_size)
        blocked = min(end, other.end) - max(start, other.start)
        # a reserve, not the lack of blocks, keeps this request waiting
        if blocked <= 0.0 or needs <= free:
            continue
        seconds += blocked
        if blocked > longest:
            longest, proof = blocked, (head, other.id, needs, free, other.needs)
    if seconds == 0.0 or seconds < MIN_BLOCKED_SHARE * _length(record):
        return None
    head, behind, needs, free, other_needs = proof
    return HeadOfLineBlocking((head, behind), seconds, longest, needs, free, other_needs)


def _heads_without_blocks(record: RunRecord) -> Iterator[tuple[int, float, float]]:
    """Yield (request id, start, end) of the periods in which the queue's head lacked blocks."""
    end = record.engine_halt.since if record.engine_halt else record.end
    following = [at for at, _ in record.queue_heads[1:]] + [end]
    for (start, held), until in zip(record.queue_heads, following, strict=False):
        if held and held.why == "blocks" and until > start:
            yield held.id, start, until


def _least_free(record: RunRecord, start: float, end: float) -> int:
    """Return the smallest number of free blocks after a schedule call between two times (s)."""
    log = record.steps
    first, last = bisect_left(log.decided, start), bisect_left(log.decided, end)
    if first == last:
        return log.free_blocks[first - 1] if first else record.num_blocks
    return min(log.free_blocks[first:last])


def _known(record: RunRecord, request: int, at: float) -> int:
    """Return the number of prompt and emitted tokens of a request at time ``at`` (s)."""
    life, ends = record.requests[request], record.steps.end
    emitted = sum(
        (count := bisect_right(ends, at, first, last + 1) - first)
        + (life.extra_tokens_in(first, first + count - 1) if count else 0)
        for first, last in emitting_rows(life)
    )
    return life.request.prompt_tokens + emitted


def _length(record: RunRecord) -> float:
    """Return the seconds from the first arrival to the last outcome."""
    lives = record.requests.values()
    last = max((life.ended_at or 0.0 for life in lives), default=0.0)
    return last - min((life.request.arrival for life in lives), default=0.0)
