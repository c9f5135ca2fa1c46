"""How many blocks TensorRT-LLM's requests hold and need (``kvCacheManager.cpp``).

One window of attention that covers every sequence, beams of one, nothing shared.
"""

from __future__ import annotations

from simkv.core.blocks import BlockPool, UnnumberedPool
from simkv.core.scheduler import blocks_for
from simkv.schedulers.trtllm.requests import LlmRequest


class KvCache:
    """Blocks of KV: a prompt takes all of its blocks with its first chunk, a decode one by one."""

    def __init__(self, num_blocks: int, tokens_per_block: int) -> None:
        self.pool: BlockPool = UnnumberedPool(num_blocks)
        self.tokens_per_block = tokens_per_block

    def to_completion(self, r: LlmRequest) -> int:
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
            self.pool.take(r.id, blocks_for(r.prompt, self.tokens_per_block))
        elif r.state == "generation":
            if r.cached % self.tokens_per_block == 0:
                self.pool.take(r.id, 1)
            r.cached += 1
