"""FastDeploy's resource manager of PR #7038.

It prefills first. It reserves memory for a share of the remaining output tokens.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from simkv.core.scheduler_protocol import blocks_for
from simkv.schedulers.fastdeploy.config import FastDeployConfig
from simkv.schedulers.fastdeploy.resource_manager import FastDeployRequest, ResourceManager


class RatioReserve(ResourceManager):
    """Resource manager of the variants ``ratio`` and ``ratio-worker-faithful`` (PR #7038).

    A step contains prefills if any are possible. Otherwise it contains decodes.
    """

    # Floats are added in the same order as in the engine, because the admission test rounds their
    # sum.

    requeue_at_head = False

    def __init__(self, config: FastDeployConfig) -> None:
        super().__init__(config.block_size, config.num_blocks, config.max_num_seqs)
        self.config = config
        self.ratio = min(config.init_new_token_ratio, 1)
        self.min_ratio = self.ratio * config.min_new_token_ratio_factor
        self._decay = (self.ratio - self.min_ratio) / config.new_token_ratio_decay_steps
        self.prefilled = False

    @property
    def full(self) -> bool:
        return None not in self.slots  # pending and preempted requests keep their slots

    def growing(self, seq: FastDeployRequest, steps: int) -> Sequence[int]:
        return range((-seq.total) % self.block_size + 1, steps + 1, self.block_size)

    def decay(self, steps: int, growing: int) -> None:  # noqa: ARG002
        for _ in range(steps):
            if self.ratio > self.min_ratio:
                self.ratio = max(self.ratio - self._decay, self.min_ratio)

    def _decide(self) -> None:
        decodes = [seq for seq in self.running if seq.decoding]
        self._chunk = self.config.chunked_prefill_size
        self._input = self.config.rem_input_tokens - len(decodes)
        self._reserved: float = 0
        for seq in decodes:  # negative values are possible, as in the engine
            self._reserved += min(seq.max_tokens - seq.out, self._clip) * self.ratio
        self._reserved_new = 0
        self.prefilled = False
        if self.active is None or self._continue_active(self.active):
            self._admit_waiting()
        if self.prefilled:
            return  # decodes continue in the blocks that they already have
        self._advance_decodes()
        if decodes and not self.preempted:
            self.decay(1, 0)

    def _continue_active(self, seq: FastDeployRequest) -> bool:
        """Schedule the next chunk of the unfinished prefill, regardless of the input budget."""
        if not self._admit(seq, self._size(seq, bounded=False)):
            return False
        if seq.decoding:
            self.active = None
            self.running.append(seq)
        return True

    def _admit_waiting(self) -> None:
        while self.waiting and self._input > 0 and self._chunk > 0:
            if self.full:
                self.why = "slot"
                break
            seq = self._head()
            if not self._admit(seq, self._size(seq, bounded=True)):
                break
            self.waiting.popleft()
            self._seat(seq)
            if not seq.decoding:
                self.active = seq
                break
            self.running.append(seq)

    def _size(self, seq: FastDeployRequest, *, bounded: bool) -> int:
        """Return the number of tokens of the next chunk, or 0.

        With ``bounded``, the remaining input budget limits the chunk.
        """
        left = seq.need - seq.computed
        tokens = left
        if bounded:
            if self._input <= 0 or (self.prefilled and self._page(left) >= self._input):
                return 0
            tokens = min(left, self._input)
        cut = tokens < left
        if self._page(tokens) > self._chunk:
            tokens = min(tokens, self._floor(self._chunk))
            cut = True
        return self._floor(tokens) if cut else tokens

    def _admit(self, seq: FastDeployRequest, tokens: int) -> bool:
        if tokens <= 0:
            return False
        blocks = self._blocks_of_chunk(seq, tokens)
        last = seq.computed + tokens >= seq.need
        to_come = min(seq.max_tokens, self._clip) if last else 0
        size = self.block_size
        held_back = blocks * size + to_come + self._reserved + self._reserved_new
        if self.pool.free < (held_back + size - 1) // size:
            self.why = self._lack(blocks)
            return False
        self._prefill(seq, tokens, blocks)
        self.prefilled = True
        self._input -= self._page(tokens)
        self._chunk -= self._page(tokens)
        self._reserved_new += to_come  # the whole expected output, not multiplied by the ratio
        return True

    def _advance_decodes(self) -> None:
        i = 0
        while i < len(self.running):
            seq = self.running[i]
            if seq.total > seq.need:
                seq.computed = seq.total - 1
            blocks = 0
            # stays true until the request emits its next token
            if (seq.total - 1) % self.block_size == 0:
                if self.pool.free < 1:
                    self._retract(seq)
                if self.pool.free < 1:
                    self._preempt(seq, seq)
                    continue
                blocks = 1
            # A request that has just preempted itself still gets the block and the task, as in the
            # engine. It is no longer in the list, so the loop skips the request after it.
            self._grow(seq, blocks)
            i += 1

    def _retract(self, by: FastDeployRequest) -> None:
        """Preempt decodes, fewest output tokens first, until a block is free or one decode
        remains.
        """
        decodes = [seq for seq in self.running if seq.decoding]
        decodes.sort(key=lambda seq: (seq.out, -seq.prompt_tokens), reverse=True)
        if len(decodes) < 2:
            return
        while self.pool.free < 1 and len(decodes) > 1:
            self._preempt(decodes.pop(), by)
        emitted = sum(seq.out + self.config.retract_decode_steps for seq in decodes)
        allowed = sum(seq.max_tokens for seq in decodes) + 1
        self.ratio = min(max(emitted / allowed, 1e-6), 1.0)

    @property
    def _clip(self) -> int:
        return self.config.clip_max_new_tokens_estimation

    def _page(self, tokens: int) -> int:
        return blocks_for(tokens, self.block_size) * self.block_size

    def _floor(self, tokens: int) -> int:
        return tokens // self.block_size * self.block_size

    def fingerprint(self) -> Hashable:
        return super().fingerprint(), self.ratio
