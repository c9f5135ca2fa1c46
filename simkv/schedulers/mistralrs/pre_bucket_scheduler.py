"""mistral.rs's scheduler before length buckets."""

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
    """Scheduler of the revision without length buckets (variant ``seed``).

    An allocation includes a slot for the next token.
    """

    def __init__(self, config: MistralrsConfig) -> None:
        super().__init__(config, config.num_gpu_blocks)

    def _choose(self) -> list[Sequence]:
        scheduled = self._admit()
        return self._decode() if scheduled is None else scheduled

    def _admit(self) -> list[Sequence] | None:
        """Admit waiting sequences while they fit and return them.

        Returns None if no sequence was scheduled or ignored.
        """
        scheduled: list[Sequence] = []
        again: list[Sequence] = []
        # Never reset in a call (an engine bug): if the head is ignored, all sequences after it are
        # ignored too.
        ignored = False
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
                # an existing block table is overwritten and its blocks leak
                self.pool.abandon(q.id)
                self.pool.take(q.id, self._need(q))
            # after an eviction, the head is the victim instead of q
            popped = self.waiting.popleft()
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
        """Return the number of blocks for all tokens of ``q`` and the next one."""
        return q.length // self.config.block_size + 1

    def _can_allocate(self, q: Sequence) -> Literal["ok", "later", "impossible"]:
        """Return whether ``q`` can be allocated now, later or never."""
        # Every "later" adds to ``q.failures``.
        if self._need(q) > self.pool.num_blocks:
            return "impossible"
        if self._need(q) > self.pool.free:
            q.failures += 1
            return "later"
        return "ok"

    def _append_need(self, q: Sequence) -> int:
        """Return the number of blocks (0 or 1) that the next token of ``q`` needs."""
        return int(self.pool.held(q.id) > 0 and q.length % self.config.block_size == 0)

    def _preempt(self, q: Sequence, by: Sequence, why: PreemptionReason = "blocks") -> None:
        q.state = SequenceState.WAITING
        self.pool.release(q.id)
        self.waiting.appendleft(q)
        self._batch.preempt(q.id, by.id, why)
        self._why = "blocks"
