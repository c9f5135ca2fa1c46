"""FastDeploy's resource managers that reserve a number of blocks or, since PR #7444, a ratio."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import takewhile

from simkv.core.scheduler_protocol import blocks_for
from simkv.schedulers.fastdeploy.config import FastDeployConfig
from simkv.schedulers.fastdeploy.resource_manager import (
    FastDeployRequest,
    RequestStatus,
    ResourceManager,
)


class FixedReserve(ResourceManager):
    """Resource manager that reserves a number of blocks per running request.

    After a preemption, a request is admitted only if its first chunk fits. With ``full_need``, its
    whole prefill must fit.
    """

    # ``full_need`` is set for the variants ``fixed-reserve-full-need`` and ``preempt-sync``. In the
    # other variants, the first chunk must fit.

    #: Number of tokens that a running decode takes from the token budget.
    decode_cost = 1

    def __init__(self, config: FastDeployConfig, full_need: bool = False) -> None:
        super().__init__(config.block_size, config.num_blocks, config.max_num_seqs)
        self.config = config
        self.full_need = full_need
        self.relaxed = True  # nothing is reserved until the first preemption
        self.reserve = config.reserve_init
        self.reserve_exact: float = config.reserve_init
        self._admitting = True
        self.grows_by = config.enc_dec_block_num

    @property
    def full(self) -> bool:
        return self._seats_taken() >= self.config.max_num_seqs

    @property
    def admission_is_stable(self) -> bool:
        return not self._tasks  # each call with tasks reduces the reserve

    def growing(self, seq: FastDeployRequest, steps: int) -> Sequence[int]:
        if self._budget_of_decodes() <= 0:
            return ()
        spare = self.config.prealloc_dec_block_slot_num_threshold
        left = self.pool.held(seq.id) * self.block_size - seq.total - spare
        found: list[int] = []
        while (step := max(left, found[-1] + 1 if found else 1)) <= steps:
            found.append(step)
            left += self.grows_by * self.block_size
        return found

    def decay(self, steps: int, growing: int) -> None:  # noqa: ARG002
        for _ in range(growing):
            self._decay()

    def _decide(self) -> None:
        budget = self._advance_running(self._budget())
        if self.preempted:
            self.why = "blocks"
        elif self._admitting:
            self._admit_waiting(budget)
        if self._tasks:
            self._decay()

    def _advance_running(self, budget: int) -> int:
        config, i, self._admitting = self.config, 0, True
        while i < len(self.running) and budget > 0:
            seq = self.running[i]
            if seq.decoding:
                if seq.total > seq.need:
                    seq.computed = seq.total - 1
                slack = self.pool.held(seq.id) * config.block_size - seq.total
                if slack <= config.prealloc_dec_block_slot_num_threshold:
                    if not self._room(seq, config.enc_dec_block_num):
                        self.why = "blocks"
                        break
                    self._grow(seq, config.enc_dec_block_num)
                budget -= self.decode_cost
            else:
                tokens = min(seq.need - seq.computed, budget)
                blocks = self._blocks_of_chunk(seq, tokens)
                if not self._room_for_chunk(seq, blocks):
                    self.why = self._lack(blocks)
                    break
                self._prefill(seq, tokens, blocks)
                budget -= tokens
            i += 1
        return budget

    def _admit_waiting(self, budget: int) -> None:
        while self.waiting and budget > 0:
            if self.full:
                self.why = "slot"
                break
            seq = self._head()
            tokens = min(seq.need - seq.computed, budget)
            blocks = self._blocks_of_chunk(seq, tokens)
            if self.pool.free < self._wanted(seq, blocks):
                self.why = self._lack(blocks)
                break
            self.waiting.popleft()
            self.running.append(seq)
            self._prefill(seq, tokens, blocks)
            budget -= tokens
            self._seat(seq)

    def _budget(self) -> int:
        return self.config.max_num_batched_tokens

    def _budget_of_decodes(self) -> int:
        """Return the token budget of a call in which all running requests decode."""
        return self._budget()

    def _seats_taken(self) -> int:
        # Pending requests occupy slots but are not counted. SlotOverrun follows if acknowledgements
        # are late.
        return len(self.running)

    def _wanted(self, seq: FastDeployRequest, blocks: int) -> int:
        """Return the number of free blocks that the admission of a chunk requires."""
        if self.relaxed:
            return blocks
        if self.full_need:
            blocks = blocks_for(seq.need, self.block_size)
        return blocks + len(self.running) * self.reserve

    def _room(self, seq: FastDeployRequest, blocks: int) -> bool:
        """Preempt running requests until ``blocks`` blocks are free.

        Returns whether ``seq`` can use them.
        """
        if self.pool.free >= blocks:
            return True
        self._at_trigger()
        while self.pool.free < blocks and (victim := self._victim()):
            self._preempt(victim, seq)
            self._at_victim()
            if victim is seq:
                return False
        return self.pool.free >= blocks

    def _room_for_chunk(self, seq: FastDeployRequest, blocks: int) -> bool:
        return self._room(seq, blocks)

    def _victim(self) -> FastDeployRequest | None:
        return self.running[-1] if self.running else None

    def _at_trigger(self) -> None:
        self._reset_reserve()

    def _at_victim(self) -> None:
        pass

    def _reset_reserve(self) -> None:
        self.reserve = self.config.reserve_init
        self.reserve_exact = self.config.reserve_init
        self.relaxed = False

    def _decay(self) -> None:
        self.reserve_exact -= self.config.reserve_decay
        self.reserve = max(int(self.reserve_exact), self.config.reserve_min, 0)
        if self.reserve == 0:
            self.relaxed = True

    def fingerprint(self) -> Hashable:
        # Once the rounded reserve is at its minimum, a further decrease of its exact value has no
        # effect.
        at_rest = int(self.reserve_exact) <= self.config.reserve_min
        exact = None if at_rest else self.reserve_exact
        return super().fingerprint(), self.reserve, exact, self.relaxed


class DecodeOnlyPreempt(FixedReserve):
    """Resource manager of the variant ``decode-only-preempt`` (PR #7444)."""

    decode_cost = 0

    def __init__(self, config: FastDeployConfig) -> None:
        super().__init__(config)
        self.by_ratio = config.use_new_token_ratio_reserve == 1
        self.ratio = config.init_new_token_ratio
        #: Number of running requests counted in this decision, and the blocks they reserve
        #: together.
        self._reserved = 0, 0

    def _decide(self) -> None:
        self._reserved = 0, 0
        super()._decide()

    @property
    def admission_is_stable(self) -> bool:
        return not self.by_ratio and super().admission_is_stable

    def _budget(self) -> int:
        return self.config.max_num_batched_tokens - sum(seq.decoding for seq in self.running)

    def _budget_of_decodes(self) -> int:
        return self.config.max_num_batched_tokens - len(self.running)

    def _seats_taken(self) -> int:
        # Preempted requests return to the head of the queue, before all new ones.
        back = takewhile(lambda seq: seq.status is RequestStatus.PREEMPTED, self.waiting)
        return len(self.running) + len(self.pending) + sum(1 for _ in back)

    def _wanted(self, seq: FastDeployRequest, blocks: int) -> int:
        if not self.by_ratio:
            return super()._wanted(seq, blocks)
        counted, reserved = self._reserved
        # a running prefill also reserves blocks for its own output
        for other in self.running[counted:]:
            left = min(other.max_tokens - other.out, self.config.clip_max_new_tokens)
            reserved += blocks_for(max(int(left * self.ratio), 0), self.block_size)
        self._reserved = len(self.running), reserved
        return blocks + reserved

    def _room_for_chunk(self, seq: FastDeployRequest, blocks: int) -> bool:
        self._admitting = self.pool.free >= self._wanted(seq, blocks)
        return self._admitting

    def _victim(self) -> FastDeployRequest | None:
        decodes = (
            seq for seq in reversed(self.running) if seq.status is RequestStatus.RUNNING_DECODE
        )
        return next(decodes, None)

    def _at_trigger(self) -> None:
        pass

    def _at_victim(self) -> None:
        if not self.by_ratio:
            self._reset_reserve()
            return
        self.ratio = self.config.init_new_token_ratio
        self._reserved = 0, 0
        if self.running:
            headroom = 16 * self.block_size
            late = sum(seq.total > seq.need for seq in self.running)
            emitted = sum(seq.out for seq in self.running) + headroom * late
            allowed = sum(seq.max_tokens for seq in self.running) + 1
            self.ratio = min(emitted / allowed, self.ratio)

    def _decay(self) -> None:
        if not self.by_ratio:
            super()._decay()
            return
        lower = self.ratio - self.config.new_token_ratio_decay
        self.ratio = max(lower, self.config.min_new_token_ratio)

    def fingerprint(self) -> Hashable:
        return super().fingerprint() if not self.by_ratio else (super().fingerprint(), self.ratio)
