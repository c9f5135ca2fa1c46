"""Who may run: TensorRT-LLM's capacity scheduler (``PyCapacityScheduler``), by its policies.

Each is asked in every step with all active requests in the order in which they came. There are
never more of these than ``max_batch_size``, so its limit on them is not looked at here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from simkv.core.scheduler_protocol import WaitReason
from simkv.schedulers.trtllm.llm_request import LlmRequest
from simkv.schedulers.trtllm.memory import KvCache


class CapacityResult(NamedTuple):
    """Who may run (``fits``), whose blocks are taken back and for whose sake (``paused``, None for
    that of all before it), and why the first who may not run is left out. Those ``skipped`` wait
    for a block that another is to compute."""

    fits: list[LlmRequest]
    paused: list[tuple[LlmRequest, LlmRequest | None]]
    why: WaitReason = "blocks"
    skipped: Sequence[LlmRequest] = ()


def no_evict(active: Sequence[LlmRequest], cache: KvCache, *, static: bool) -> CapacityResult:
    """Those whose blocks are there to the last token that they may emit (``GuaranteedNoEvict``).

    The first that is too long stops all behind it. A ``static`` batch lets nobody in while any of
    it decodes.
    """
    fits = [r for r in active if r.state != "context"]
    pending = [r for r in active if r.state == "context"]
    if static and fits:
        return CapacityResult(fits, [], "rule")
    free = cache.pool.free - sum(map(cache.blocks_to_completion, fits))
    skipped, coming = list[LlmRequest](), set() if static else cache.coming(active)
    for r in pending:
        if not static and cache.waits(r, coming):
            skipped.append(r)
            continue
        needed = cache.blocks_to_completion(r)
        if needed > free:
            why: WaitReason = "blocks" if needed > cache.pool.free else "reserved"
            return CapacityResult(fits, [], why, skipped)
        fits.append(r)
        free -= needed
    return CapacityResult(fits, [], skipped=skipped)


def max_utilization(active: Sequence[LlmRequest], cache: KvCache) -> CapacityResult:
    """Those whose blocks are there for this step (``MaxUtilization``).

    For one that lacks some the last that has any is paused, be it this one, until it fits or nobody
    behind it has any. If it is one that nobody had to wait for yet, it then waits for itself.
    """
    fits: list[LlmRequest] = []
    paused: list[tuple[LlmRequest, LlmRequest | None]] = []
    skipped, coming = list[LlmRequest](), cache.coming(active)
    at, end, needed, free = 0, len(active), 0, cache.pool.free
    while at < end:
        r = active[at]
        if cache.waits(r, coming):
            skipped.append(r)
            at += 1
            continue
        more = cache.one_step(r)
        if needed + more <= free:
            fits.append(r)
            needed += more
            at += 1
            continue
        last = next((i for i in range(end - 1, at - 1, -1) if active[i].started), None)
        if last is None:
            break
        victim = active[last]
        paused.append((victim, None if victim is r else r))
        free = cache.pool.free + cache.freed([r for r, _ in paused])
        end = last
    return CapacityResult(fits, paused, skipped=skipped)
