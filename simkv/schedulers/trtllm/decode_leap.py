"""Many decode steps of TensorRT-LLM at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from simkv.schedulers.trtllm.llm_request import LlmRequest
from simkv.schedulers.trtllm.memory import KvCache


def leap(rows: Sequence[LlmRequest], cache: KvCache, least: int, ahead: int, most: int) -> int:
    """For how many steps ``rows`` decode on, while nobody is at its end and blocks are enough.

    So many are to be left as ``least``. The loop sees so many steps ``ahead`` that one is at its
    end.
    """
    for r in rows:
        most = min(most, r.new - r.generated - ahead)
    free = cache.pool.free
    if free < least:
        return 1
    for step, growing in sorted(_growth(rows, cache, most - 1).items()):
        free -= growing
        if free < least:
            return step
    return max(most, 1)


def skip(rows: Sequence[LlmRequest], cache: KvCache, steps: int) -> list[int]:
    """Do what that many such steps do; the free blocks after each of their decisions."""
    growth = _growth(rows, cache, steps)
    free, left = [], cache.pool.free
    for step in range(1, steps + 1):
        left -= growth[step]
        free.append(left)
    turns = ((step, at) for at, r in enumerate(rows) for step in _borders(r, cache, steps))
    for _, at in sorted(turns):
        cache.take(rows[at], 1)
    for r in rows:
        r.cached += steps
        r.known += steps
    return free


def _growth(rows: Sequence[LlmRequest], cache: KvCache, steps: int) -> Counter[int]:
    """How many requests take a block, by step; only steps in which anybody does."""
    return Counter(step for r in rows for step in _borders(r, cache, steps))


def _borders(r: LlmRequest, cache: KvCache, steps: int) -> range:
    """The steps from now on, of so many, in which ``r`` takes a block."""
    size = cache.tokens_per_block
    return range(1 + -r.cached % size, steps + 1, size)
