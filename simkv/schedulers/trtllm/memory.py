"""How many blocks TensorRT-LLM's requests hold and need (``kvCacheManager.cpp``).

One window of attention that covers every sequence, beams of one. What is shared does not count as
less: that came after the revision (#11490).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from simkv.core.block_pool import BlockPool, UnnumberedPool
from simkv.core.request import Prompt
from simkv.core.scheduler_protocol import blocks_for
from simkv.schedulers.trtllm.llm_request import LlmRequest


class KvCache:
    """Blocks of KV: a prompt takes all of its blocks with its first chunk, a decode one by one."""

    def __init__(self, num_blocks: int, tokens_per_block: int) -> None:
        self.pool: BlockPool = UnnumberedPool(num_blocks)
        self.tokens_per_block = tokens_per_block

    def blocks_to_completion(self, r: LlmRequest) -> int:
        """Blocks that ``r`` still needs if it emits all that it may
        (``getRemainingBlocksToCompletion``)."""
        return blocks_for(r.prompt + r.new, self.tokens_per_block) - self.pool.held(r.id)

    def one_step(self, r: LlmRequest) -> int:
        """Blocks that ``r`` needs now, none for a later chunk (``getNeededBlocksOneStep``)."""
        if r.first_chunk:
            return blocks_for(r.prompt, self.tokens_per_block)
        more = min(1, r.new - (r.cached - r.prompt))
        if r.state == "context":
            return 0
        after = blocks_for(r.cached + more, self.tokens_per_block)
        return after - blocks_for(r.cached, self.tokens_per_block)

    def prepare(self, r: LlmRequest) -> None:
        """Take what ``r`` needs for the step that it is in (``addSequence``, ``addToken``)."""
        if r.first_chunk:
            r.cached = r.prompt
            r.begin(self.enter(r), self.tokens_per_block)
        elif r.state == "generation":
            if r.cached % self.tokens_per_block == 0:
                self.take(r, 1)
            r.cached += 1

    def take(self, r: LlmRequest, count: int) -> None:
        """Hand out blocks that ``r`` is to fill."""
        self.pool.take(r.id, count)

    def release(self, r: LlmRequest) -> None:
        """``r`` ends or is paused: its blocks come back."""
        self.pool.release(r.id)

    def freed(self, victims: Sequence[LlmRequest]) -> int:
        """Blocks that come back if these are paused (``schedulingReleaseBlocks``)."""
        return sum(self.pool.held(r.id) for r in victims)

    # ------------------------------------------------------------------ where blocks are reused

    def hear(self, prompt: Prompt) -> None:
        """A request comes."""

    def forget(self, request_id: int) -> None:
        """A request is gone."""

    def coming(self, active: Sequence[LlmRequest]) -> set[Hashable]:  # noqa: ARG002
        """Blocks that are being computed and will be there for others."""
        return set()

    def waits(self, r: LlmRequest, coming: set[Hashable]) -> bool:  # noqa: ARG002
        """Whether ``r`` had better wait for a block that is ``coming``."""
        return False

    def enter(self, r: LlmRequest) -> int:
        """Take the blocks of a prompt; returns of how many of its tokens there is KV."""
        self.take(r, blocks_for(r.prompt, self.tokens_per_block))
        return 0

    def store(self, r: LlmRequest) -> None:
        """A part of a prompt is computed."""

    def fingerprint(self) -> Hashable:
        """What decides later allocations."""
        return self.pool.free
