"""Verdict: turns recompute prefixes of earlier turns, evicted or cached on another replica."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

from simkv.core.figure_registry import format_seconds
from simkv.core.scheduler_protocol import blocks_for
from simkv.explain.cache_eviction import count_idle_tokens, find_evictors, find_lost_prefixes
from simkv.explain.verdicts.verdict import Verdict
from simkv.sim.run_record import RunRecord

#: Minimum fraction of prompt tokens that must be recomputed for this verdict. At least two turns
#: must be affected.
MIN_LOST_SHARE = 0.1


@dataclass(frozen=True)
class CacheThrash(Verdict):
    """Turns recomputed prefixes that were evicted, or that only another replica had cached.

    ``resumed`` is the number of turns whose prompt repeats an earlier turn. ``turns`` is the number
    of turns that recomputed tokens, in total ``tokens`` prompt tokens. ``idle`` is the median time
    (s) since the earlier turns. ``hit_rate`` is the prefix cache hit rate (%), and
    ``retained_hit_rate`` is the rate without evictions. ``idle_blocks`` is the number of blocks
    that the prefixes of idle sessions would need; the cache has ``num_blocks``. ``worst`` is the
    largest number of tokens that a request recomputed. ``requests`` contains this request, and the
    request that evicted most tokens. ``moved`` is the number of prompt tokens that were recomputed
    in ``moved_turns`` turns because the earlier turn ran on another replica. ``affinity_hit_rate``
    is an upper bound of the hit rate (%) that a router with session affinity would reach.
    """

    name = "cache-thrash"
    tokens: int
    turns: int
    resumed: int
    idle: float
    hit_rate: float
    retained_hit_rate: float
    idle_blocks: int
    num_blocks: int
    worst: int
    moved: int = 0
    moved_turns: int = 0
    affinity_hit_rate: float | None = None

    @property
    def text(self) -> str:
        return ". ".join(filter(None, (self._evicted_text(), self._moved_text())))

    def _moved_text(self) -> str:
        if not self.moved:
            return ""
        return (
            f"{self.moved} prompt tokens were recomputed in {self.moved_turns} turns because the "
            f"session's earlier turn ran on another replica. The hit rate was {self.hit_rate:.1f} "
            "%; with a router that keeps each session on one replica (router: session), it would "
            f"have been at most {self.affinity_hit_rate:.1f} %"
        )

    def _evicted_text(self) -> str:
        if not self.tokens:
            return ""
        victim, *evictor = self.requests
        by = "".join(f"; request {i} evicted the most" for i in evictor)
        return (
            f"{self.tokens} prompt tokens were recomputed because their blocks were evicted "
            f"while their session was idle (idle time: median {format_seconds(self.idle)}), in "
            f"{self.turns} of {self.resumed} later turns{by}; request {victim} recomputed "
            f"{self.worst} of them. The prefix cache hit rate was {self.hit_rate:.1f} %; "
            f"without these evictions it would have been {self.retained_hit_rate:.1f} %. Idle "
            f"sessions needed up to {self.idle_blocks} blocks, in addition to running requests; "
            f"the cache has {self.num_blocks}"
        )


def find_cache_thrash(
    record: RunRecord, block_size: int, moved: Mapping[int, int]
) -> CacheThrash | None:
    """Return the verdict on recomputed prefixes of earlier turns, or None.

    There is no verdict on a single turn, or below ``MIN_LOST_SHARE`` recomputed prompt tokens.
    ``block_size`` is in tokens. ``moved`` is the result of ``find_moved_prefixes``.
    """
    lost = find_lost_prefixes(record)
    if len({*moved, *(prefix.request for prefix in lost)}) < 2:
        return None
    first = [(life, life.chunks[0]) for life in record.requests.values() if life.chunk_rows]
    asked = sum(life.request.prompt_tokens for life, _ in first)
    hits = sum(min(chunk.context, life.request.prompt_tokens) for life, chunk in first)
    tokens = sum(prefix.tokens for prefix in lost)
    elsewhere = sum(moved.values())
    if tokens + elsewhere < MIN_LOST_SHARE * asked:
        return None
    recomputed = {prefix.request: prefix.tokens for prefix in lost} or moved
    worst = max(recomputed, key=lambda i: (recomputed[i], -i))
    evictors = [i for i, _ in find_evictors(record, lost) if i != worst]
    return CacheThrash(
        (worst, *evictors[:1]),
        tokens,
        len(lost),
        len(record.resumed),
        median([prefix.idle for prefix in lost] or [0.0]),
        100.0 * hits / asked,
        100.0 * (hits + tokens) / asked,
        blocks_for(count_idle_tokens(record), block_size),
        record.num_blocks,
        recomputed[worst],
        elsewhere,
        len(moved),
        100.0 * (hits + elsewhere) / asked if moved else None,
    )
