"""Blocks that TensorRT-LLM's requests hold and need (``kvCacheManager.cpp``).

The model has one attention window that covers the whole sequence, and a beam width of one. A shared
block counts for each request that holds it; later revisions count it once (#11490).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from simkv.core.block_pool import BlockPool, UnnumberedPool
from simkv.core.request import Prompt
from simkv.core.scheduler_protocol import blocks_for
from simkv.schedulers.trtllm.llm_request import LlmRequest


class KvCache:
    """KV blocks without prefix caching.

    The first chunk of a request allocates the blocks of its whole prompt.
    """

    def __init__(self, num_blocks: int, tokens_per_block: int) -> None:
        self.pool: BlockPool = UnnumberedPool(num_blocks)
        self.tokens_per_block = tokens_per_block

    def blocks_to_completion(self, r: LlmRequest) -> int:
        """Return the number of blocks that ``r`` still needs for its maximum output.

        Source: ``getRemainingBlocksToCompletion``.
        """
        return blocks_for(r.prompt + r.new, self.tokens_per_block) - self.pool.held(r.id)

    def one_step(self, r: LlmRequest) -> int:
        """Return the number of blocks that ``r`` needs in this step.

        Source: ``getNeededBlocksOneStep``.
        """
        if r.first_chunk:
            return blocks_for(r.prompt, self.tokens_per_block)
        more = min(1, r.new - (r.cached - r.prompt))
        if r.state == "context":
            return 0
        after = blocks_for(r.cached + more, self.tokens_per_block)
        return after - blocks_for(r.cached, self.tokens_per_block)

    def prepare(self, r: LlmRequest) -> None:
        """Allocate the blocks of ``r`` for the current step (``addSequence``, ``addToken``)."""
        if r.first_chunk:
            r.cached = r.prompt
            r.begin(self.enter(r), self.tokens_per_block)
        elif r.state == "generation":
            if r.cached % self.tokens_per_block == 0:
                self.take(r, 1)
            r.cached += 1

    def take(self, r: LlmRequest, count: int) -> None:
        """Allocate ``count`` blocks to ``r``."""
        self.pool.take(r.id, count)

    def release(self, r: LlmRequest) -> None:
        """Free the blocks of ``r``."""
        self.pool.release(r.id)

    def freed(self, victims: Sequence[LlmRequest]) -> int:
        """Return the number of blocks that become free if the requests ``victims`` are paused.

        Source: ``schedulingReleaseBlocks``.
        """
        return sum(self.pool.held(r.id) for r in victims)

    # ------------------------------------------------------------------ hooks for block reuse

    def hear(self, prompt: Prompt) -> None:
        """Record a new request."""

    def forget(self, request_id: int) -> None:
        """Remove the data of a request that has left the engine."""

    def coming(self, active: Sequence[LlmRequest]) -> set[Hashable]:  # noqa: ARG002
        """Return the keys of the blocks that are being computed and will be reusable."""
        return set()

    def waits(self, r: LlmRequest, coming: set[Hashable]) -> bool:  # noqa: ARG002
        """Return whether ``r`` waits for one of the blocks in ``coming``."""
        return False

    def enter(self, r: LlmRequest) -> int:
        """Allocate the blocks of a prompt and return the number of cached prompt tokens."""
        self.take(r, blocks_for(r.prompt, self.tokens_per_block))
        return 0

    def store(self, r: LlmRequest) -> None:
        """Record that a chunk of a prompt was computed."""

    def fingerprint(self) -> Hashable:
        """Return the state that determines later allocations."""
        return self.pool.free
