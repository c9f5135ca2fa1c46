"""Policies of TensorRT-LLM's capacity scheduler (``PyCapacityScheduler``).

The scheduler calls its policy in every step with all active requests in arrival order. Their number
never exceeds ``max_batch_size``, so the policies do not check this limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from simkv.core.scheduler_protocol import WaitReason
from simkv.schedulers.trtllm.llm_request import LlmRequest
from simkv.schedulers.trtllm.memory import KvCache


class CapacityResult(NamedTuple):
    """Result of the capacity scheduler.

    - ``fits``: requests that may run.
    - ``paused``: pairs of a paused request and the request that needs its blocks. The second
      request is None if the paused request itself lacks blocks.
    - ``why``: reason why the first waiting request may not run.
    - ``skipped``: requests that wait for a block that another request computes.
    """

    fits: list[LlmRequest]
    paused: list[tuple[LlmRequest, LlmRequest | None]]
    why: WaitReason = "blocks"
    skipped: Sequence[LlmRequest] = ()


def no_evict(active: Sequence[LlmRequest], cache: KvCache, *, static: bool) -> CapacityResult:
    """Return the requests that can run to their end (policy ``GuaranteedNoEvict``).

    Blocks must suffice for the maximum output of all of them. The first request that does not fit
    blocks all later ones. If ``static``, no request is admitted while any request decodes.
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
    """Return the requests that fit in this step (policy ``MaxUtilization``).

    If a request lacks blocks, started requests are paused until enough blocks are free. The last
    request is paused first. The request that lacks blocks can be paused itself.
    """
    # Started requests before it are never paused. With block reuse, a request that is considered
    # again after such a pause is skipped: its own first new block is by then in the set of blocks
    # being computed.
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
