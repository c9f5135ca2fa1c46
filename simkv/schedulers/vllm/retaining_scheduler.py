"""vLLM's scheduler with a prefix cache that retains the blocks of ended requests.

No release of vLLM has this: its cache evicts the least recently used block. The proposals
vllm-project/vllm#37003 and #38514 have priorities and times to live by request.
"""

from __future__ import annotations

from collections.abc import Collection
from math import inf

from simkv.core.block_retention import RetentionPool
from simkv.core.scheduler_protocol import Batch, Completion
from simkv.schedulers.vllm.config import VllmConfig
from simkv.schedulers.vllm.release_rules import VllmRules
from simkv.schedulers.vllm.request_state import RequestState
from simkv.schedulers.vllm.scheduler import VllmScheduler


class VllmRetainingScheduler(VllmScheduler):
    """Scheduler whose prefix cache retains the blocks of a request for some time after its end."""

    # The request asks for the time; requests whose priority value is at most ``pin_priority`` have
    # no limit.

    # If VllmScheduler is compiled, copies must include the attributes of this class.
    __mypyc_attrs__ = (*getattr(VllmScheduler, "__mypyc_attrs__", ()), "__dict__")

    def __init__(
        self, config: VllmConfig, rules: VllmRules | None = None, *, tables: bool = False
    ) -> None:
        super().__init__(config, rules, tables=tables)
        assert isinstance(self.memory.cache, RetentionPool)
        self._pool = self.memory.cache

    def set_time(self, now: float) -> None:
        """Set the time in seconds. Blocks whose retention has ended are evicted first."""
        self._pool.queue.set_time(now)

    def complete(self, batch: Batch, ended: Collection[int]) -> Completion:
        self._pool.queue.stop_clock()  # the next iteration knows the time
        return super().complete(batch, ended)

    def leap(self, most: int) -> int:
        """Return the number of decode-only steps, as ``VllmScheduler.leap`` does."""
        # The result is 1 while the retention of a block can end, which changes the order of
        # eviction.
        return 1 if self._pool.queue.has_deadline else super().leap(most)

    def _remove(self, r: RequestState) -> None:
        self._pool.hold = self._seconds(r)
        super()._remove(r)
        self._pool.hold = 0.0

    def _seconds(self, r: RequestState) -> float:
        pinned = self.config.pin_priority
        if pinned is not None and r.prompt.priority <= pinned:
            return inf
        return (r.prompt.retention or 0.0) if self.config.request_retention else 0.0
