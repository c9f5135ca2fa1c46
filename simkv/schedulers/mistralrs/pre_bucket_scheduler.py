"""mistral.rs before length buckets, with a block engine that counts one slot ahead."""

from __future__ import annotations

from collections import deque
from typing import Literal

from simkv.core.scheduler_protocol import PreemptionReason
from simkv.schedulers.mistralrs.config import MistralrsConfig
from simkv.schedulers.mistralrs.scheduler_base import (
    MIXED_DECODE,
    LoopGuard,
    MistralrsScheduler,
    Sequence,
    SequenceState,
    has_other_modality,
)


class PreBucketScheduler(MistralrsScheduler):
    """The scheduler before length buckets, with a block engine that counts one slot ahead."""

    def __init__(self, config: MistralrsConfig) -> None:
        super().__init__(config, config.num_gpu_blocks)

    def _choose(self) -> list[Sequence]:
        scheduled = self._admit()
        return self._decode() if scheduled is None else scheduled

    def _admit(self) -> list[Sequence] | None:
        """Move waiting sequences to running while they fit; return None if decodes may run."""
        scheduled: list[Sequence] = []
        again: list[Sequence] = []
        ignored = False  # never reset in a call: all after an ignored head are ignored
        watch = LoopGuard()
        while self.waiting:
            q = self.waiting[0]
            if self._capped():
                self._why = "slot"
                break
            waited = q.failures
            fits = self._can_allocate(q)
            if fits == "later":
                if waited <= self.config.waiting_timeout:
                    self._why = "blocks"
                    break
                watch.look(
                    self.fingerprint(),
                    [q, *self.running],
                    "the evicted sequence is put "
                    "back in place of the waiting one, which is examined again",
                )
                if self.running:
                    self._preempt(self.running.pop(), q, "patience")
                    if self._can_allocate(q) != "ok":
                        self._ignore(q)
                        ignored = True
                else:
                    self._ignore(q)
                    ignored = True
            elif fits == "impossible":
                self._ignore(q)
                ignored = True
            if has_other_modality(q, scheduled):
                again.append(self.waiting.popleft())
                continue
            if not ignored:
                q.state = SequenceState.PROMPT
                self.pool.abandon(q.id)  # an existing table is overwritten and leaks
                self.pool.take(q.id, self._need(q))
            popped = self.waiting.popleft()  # after an eviction this is the victim, not q
            self.running.append(popped)
            if not ignored:
                scheduled.append(popped)
        self.waiting.extend(again)
        self._defer(again)
        return scheduled if scheduled or ignored else None

    def _decode(self) -> list[Sequence]:
        todo = deque(sorted(self.running, key=lambda q: q.prompt.arrival)[::-1])
        keep: list[Sequence] = []
        watch = LoopGuard()
        while todo:
            q = todo.popleft()
            while self._append_need(q) > self.pool.free:
                if not todo:
                    self._preempt(q, q)
                    break
                self._preempt(todo.pop(), q)
            else:
                self.pool.take(q.id, self._append_need(q))
                if not has_other_modality(q, keep):
                    keep.append(q)
                else:
                    todo.append(q)
                    watch.look((tuple(todo), self.pool.free), [*keep, *todo], MIXED_DECODE)
        self.running = keep
        for q in keep:
            q.state = SequenceState.COMPLETION
        return list(keep)

    def _capped(self) -> bool:
        return len(self.running) + 1 == self.config.max_num_seqs

    def _need(self, q: Sequence) -> int:
        """Return the blocks for all tokens and the next one."""
        return q.length // self.config.block_size + 1

    def _can_allocate(self, q: Sequence) -> Literal["ok", "later", "impossible"]:
        """Return whether ``q`` fits; every "later" is counted until ``q`` ends."""
        if self._need(q) > self.pool.num_blocks:
            return "impossible"
        if self._need(q) > self.pool.free:
            q.failures += 1
            return "later"
        return "ok"

    def _append_need(self, q: Sequence) -> int:
        """Return 1 at a block border, otherwise 0; 0 for a sequence without a block table."""
        return int(self.pool.held(q.id) > 0 and q.length % self.config.block_size == 0)

    def _preempt(self, q: Sequence, by: Sequence, why: PreemptionReason = "blocks") -> None:
        q.state = SequenceState.WAITING
        self.pool.release(q.id)
        self.waiting.appendleft(q)
        self._batch.preempt(q.id, by.id, why)
        self._why = "blocks"
