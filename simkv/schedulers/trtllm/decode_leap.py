"""Computation of several decode-only steps of TensorRT-LLM at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from simkv.schedulers.trtllm.llm_request import LlmRequest
from simkv.schedulers.trtllm.memory import KvCache


def leap(rows: Sequence[LlmRequest], cache: KvCache, least: int, ahead: int, most: int) -> int:
    """Return the number of decode-only steps until a request ends or blocks run out.

    The result is at most ``most``. ``least`` blocks must stay free. A request leaves the batch
    ``ahead`` steps before its end is processed.
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
    """Simulate ``steps`` decode steps. Return the number of free blocks after each step."""
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
    """Return the number of requests that take a block, by step.

    Steps in which no request takes a block are omitted.
    """
    return Counter(step for r in rows for step in _borders(r, cache, steps))


def _borders(r: LlmRequest, cache: KvCache, steps: int) -> range:
    """Return the steps, among the next ``steps``, in which ``r`` takes a block."""
    size = cache.tokens_per_block
    return range(1 + -r.cached % size, steps + 1, size)
