"""The PagedAttention scheduler of EricLBuehler/mistral.rs, from 2025-05 to 2026-07, bugs included.

It covers seven revisions of one file of that repository. The variant ``seed`` has its own block
engine and is in ``pre_bucket_scheduler``. The other variants use the code of ``bucketed`` and
differ in their ``MistralrsRules``. ``pr2034july`` restructured the scheduling decision, so it also
overrides several methods.

In all variants, waiting requests are scheduled before decodes, and a batch contains either prefills
or decodes. A preempted sequence keeps its tokens, returns to the front of the queue and prefills
all of its tokens again. The engine never rejects a request at arrival and does not detect
disconnected clients.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable

from simkv.core.block_keys import BlockKeys
from simkv.core.block_pool import NO_BLOCKS
from simkv.core.scheduler_protocol import PreemptionReason, blocks_for
from simkv.schedulers.mistralrs.config import MistralrsConfig
from simkv.schedulers.mistralrs.scheduler_base import (
    FINISHED,
    MIXED_DECODE,
    UNLIMITED_STEPS,
    LoopGuard,
    MistralrsScheduler,
    Sequence,
    SequenceState,
    has_other_modality,
)
from simkv.schedulers.mistralrs.versions import RULES, MistralrsRules

Key = tuple[int, bool]


class BucketedScheduler(MistralrsScheduler):
    """Scheduler of all variants except ``seed``. ``rules`` are the rules of the variant."""

    def __init__(self, config: MistralrsConfig, rules: MistralrsRules | None = None) -> None:
        super().__init__(config, config.num_gpu_blocks - 1)
        self.rules = rules or RULES[config.variant]
        self._keys = BlockKeys(config.block_size)

    def _choose(self) -> list[Sequence]:
        admitted = self._admit()
        if admitted:
            chosen, others = self._bucket(admitted)
            self._bounce(others, chosen)
            return chosen
        return self._decode()

    def _admit(self) -> list[Sequence]:
        scheduled: list[Sequence] = []
        again: list[Sequence] = []
        looked_at = prefill_tokens = 0
        while self.waiting:
            q = self.waiting[0]
            if self._capped():
                self._why = "slot"
                break
            if self.rules.prefill_limit:
                tokens = prefill_tokens + q.length
                if looked_at and (
                    tokens > self.config.prefill_batch_max_tokens
                    or looked_at >= self.config.prefill_batch_max_seqs
                ):
                    self._why = "budget"
                    break
                looked_at, prefill_tokens = looked_at + 1, tokens
            hit = self._lookup(q)
            ignored = False  # the loop may try an ignored head again and admits it if it then fits
            if not self._admits(q, hit):
                q.failures += 1
                if q.failures <= self.config.waiting_timeout:
                    self._why = "blocks"
                    break
                ignored = not self._evict_for(q, hit)
            if not self.rules.mixed_prefill and has_other_modality(q, scheduled):
                if not ignored:
                    self.pool.release(q.id)
                again.append(self.waiting.popleft())
                continue
            if not ignored:
                q.state = SequenceState.PROMPT
                q.prefix = q.computed = len(hit) * self.config.block_size
            # after an eviction, the head is the last victim instead of q
            popped = self.waiting.popleft()
            if ignored:
                popped.failures = 0
                self.pool.release(popped.id)
                # the sequence is now in no queue, even if it was a victim that was not ignored
                continue
            self.running.append(popped)
            scheduled.append(popped)
        self.waiting.extend(again)
        self._defer(again)
        return scheduled

    def _order_flips(self) -> bool:
        # Deferred sequences are placed before the sequences that ran. They therefore win a tie for
        # the oldest sequence in the next step.
        turns = self.rules.unequal_decodes == "wait" and self.rules.bucket == "oldest"
        return (turns or self.rules.decode_order == "newest first") and super()._order_flips()

    def _capped(self) -> bool:
        return len(self.running) >= self.config.max_num_seqs

    def _meets_others(self) -> int:
        """Return the number of steps until the batch changes because it reaches another length."""
        if self.rules.unequal_decodes == "run together":
            return UNLIMITED_STEPS
        # Sequences that just finished their prompt were grouped by their number of uncached tokens.
        length, images = self._key(self._chosen[0])
        if any(self._key(q) != (length, images) for q in self._chosen):
            return 1
        chosen = set(self._chosen)
        keys = (self._key(q) for q in self.running if q not in chosen)
        ahead = [key[0] - length for key in keys if key[1] == images]
        if 0 in ahead or (self.rules.bucket == "shortest" and any(steps < 0 for steps in ahead)):
            return 1
        return min((steps for steps in ahead if steps > 0), default=UNLIMITED_STEPS)

    def _evict_for(self, q: Sequence, hit: array[int]) -> bool:
        """Evict running sequences until ``q`` is admitted.

        Returns False and ignores ``q`` if that fails.
        """
        while self.running:
            self._preempt(self.running.pop(), q, "patience")
            if self._admits(q, hit):
                return True
            if self.rules.evict == "one":
                break
        self._ignore(q)
        return False

    def _decode(self) -> list[Sequence]:
        todo = deque(self._decode_order())
        keep: list[Sequence] = []
        appended: list[Sequence] = []
        watch = LoopGuard()
        while todo:
            q = todo.popleft()
            if not self._grows(q, todo):
                continue
            if self.rules.mixed_decode == "run together" or not has_other_modality(q, keep):
                keep.append(q)
            elif self.rules.mixed_decode == "append":
                appended.append(q)
            else:
                todo.append(q)
                watch.look((tuple(todo), self.pool.free), [*keep, *todo], MIXED_DECODE)
        self.running = keep + appended
        chosen = self._together(keep, appended)
        for q in self.running:
            q.state = SequenceState.COMPLETION
            self._register(q, q.length)
        return list(chosen)

    def _together(self, keep: list[Sequence], appended: list[Sequence]) -> list[Sequence]:
        """Return the sequences that decode in this step. Preempt or defer all others."""
        if self.rules.unequal_decodes == "run together":
            return self.running
        chosen, others = self._bucket(keep)
        if self.rules.unequal_decodes == "preempt":
            self._bounce(others, chosen)
        else:
            self._defer(others)
            self.running = others + chosen + appended
        return chosen

    def _grows(self, q: Sequence, todo: deque[Sequence]) -> bool:
        """Allocate a slot for the next token of ``q``. Preempt from the end of ``todo`` if
        necessary.

        Returns False if ``q`` itself was preempted.
        """
        while not self._allocate(q, self._decode_tokens(q)):
            if not todo:
                self._preempt(q, q)
                return False
            self._preempt(todo.pop(), q)
        return True

    def _decode_on(self, steps: int) -> None:
        if not self.config.prefix_caching:
            super()._decode_on(steps)
            return
        # A step allocates its new blocks first, which removes their old cache keys, and then
        # registers full blocks.
        size, ends = self.config.block_size, {q: q.length + steps for q in self._chosen}
        growing: dict[int, list[Sequence]] = {}
        for q in self._decode_order():
            if q in ends:
                for step in range(size - (q.length - self.border) % size, steps + 1, size):
                    growing.setdefault(step, []).append(q)
        for step, grown in sorted(growing.items()):
            for q in grown:
                self.pool.take(q.id, 1)
                q.length = ends[q] - steps + step
                q.computed = q.length - 1
            for q in sorted(grown, key=self.running.index) if len(grown) > 1 else grown:
                self._register(q, self._known_tokens(q))
        for q, end in ends.items():
            q.length, q.computed = end, end - 1

    def _decode_order(self) -> list[Sequence]:
        order = sorted(self.running, key=lambda q: q.prompt.arrival)
        return order if self.rules.decode_order == "oldest first" else order[::-1]

    def _decode_tokens(self, q: Sequence) -> int:
        """Return the number of KV slots that a decode of ``q`` needs: its tokens and one more."""
        return q.length + 1

    def _key(self, q: Sequence) -> Key:
        if q.state is SequenceState.PROMPT:
            return (q.length - q.prefix, q.has_images)
        return (q.length, False)

    def _bucket(self, sequences: list[Sequence]) -> tuple[list[Sequence], list[Sequence]]:
        """Split ``sequences`` into the length group that runs and all others.

        The others are ordered by group; the order within each group is reversed.
        """
        groups: dict[Key, list[Sequence]] = {}
        for q in sequences:
            groups.setdefault(self._key(q), []).append(q)
        if len(groups) <= 1:
            return sequences, []
        running = groups.pop(self._first(groups))
        return running, [q for group in groups.values() for q in reversed(group)]

    def _first(self, groups: dict[Key, list[Sequence]]) -> Key:
        """Return the key of the group that runs."""
        if self.rules.bucket == "shortest":
            return min(groups, key=lambda key: key[0])
        return min(groups, key=lambda key: min(q.prompt.arrival for q in groups[key]))

    def _bounce(self, others: list[Sequence], chosen: list[Sequence]) -> None:
        for q in others:
            self._preempt(q, chosen[0], "bucket")
        self._defer(others)
        gone = set(others)
        self.running = [q for q in self.running if q not in gone]

    def _preempt(self, q: Sequence, by: Sequence, why: PreemptionReason = "blocks") -> None:
        if q.state in FINISHED:
            return
        q.state = SequenceState.WAITING
        q.prefix = 0
        self._register(q, self._known_tokens(q))
        self._release(q)
        self.waiting.appendleft(q)
        self._batch.preempt(q.id, by.id, why)
        self._why = "deferred" if why == "bucket" else "blocks"

    def _free_finished(self, q: Sequence) -> None:
        self._register(q, self._known_tokens(q))
        self._release(q)

    def _admits(self, q: Sequence, hit: array[int]) -> bool:
        if not self._allocate(q, q.length, hit):
            return False
        q.failures = 0
        return True

    def _allocate(self, q: Sequence, tokens: int, hit: Iterable[int] = ()) -> bool:
        """Extend the block table of ``q``, or create it from the cached blocks ``hit`` and new
        blocks.

        Returns False and allocates nothing if too few blocks are free.
        """
        new = blocks_for(tokens, self.config.block_size) - self.pool.held(q.id)
        if q.id in self.pool.tables:
            hit = ()
        hit = list(hit)
        revived = sum(1 for block in hit if self.pool.is_free(block))
        if new - len(hit) + revived > self.pool.free:
            return False
        if hit:
            self.pool.share(q.id, hit)
            q.registered = len(hit)
        self.pool.take(q.id, max(new - len(hit), 0))
        return True

    def _release(self, q: Sequence) -> None:
        self.pool.release(q.id)
        q.registered = 0

    def _lookup(self, q: Sequence) -> array[int]:
        """Return the cached blocks of the prompt of ``q``; they never include its last token."""
        if not self.config.prefix_caching:
            return NO_BLOCKS
        self._keys.extend(q.keys, q.content, q.length)
        return self.pool.lookup(q.keys[: (q.length - 1) // self.config.block_size])

    def _known_tokens(self, q: Sequence) -> int:
        """Return the number of tokens of ``q`` to register in the prefix cache."""
        # All tokens are registered, even if the prompt never ran (an engine bug). Later hits then
        # refer to blocks without KV.
        return q.length

    def _register(self, q: Sequence, tokens: int) -> None:
        if not self.config.prefix_caching:
            return
        self._keys.extend(q.keys, q.content, tokens)
        table = self.pool.tables.get(q.id, NO_BLOCKS)
        full = min(tokens // self.config.block_size, len(table))
        for index in range(q.registered, full):
            self.pool.register(table[index], q.keys[index])
        q.registered = max(q.registered, full)


class SingleLengthScheduler(BucketedScheduler):
    """Scheduler of the variant ``pr2034july``.

    Only sequences of one length run in a step. All others wait and keep their KV.
    """

    border = 1

    def _choose(self) -> list[Sequence]:
        prompts = [q for q in self.running if q.state is SequenceState.PROMPT]
        if prompts:
            self._why = "rule"  # the queue is not examined until these prompts have run
            return self._like_the_oldest(prompts)
        admitted = self._admit()
        if admitted:
            return self._like_the_oldest(admitted)
        return self._decode()

    def _decode(self) -> list[Sequence]:
        todo = deque(self._decode_order())
        key = self._key(todo[0]) if todo else None
        keep: list[Sequence] = []
        deferred: list[Sequence] = []
        while todo:
            q = todo.popleft()
            if self._key(q) != key:
                deferred.append(q)
            elif q.length <= q.computed or self._grows(q, todo):
                keep.append(q)
        self.running = keep + deferred
        self._defer(deferred)
        for q in self.running:
            self._register(q, q.computed)
        return list(keep)

    def _decode_order(self) -> list[Sequence]:
        return sorted(self.running, key=lambda q: q.age)

    def _like_the_oldest(self, sequences: list[Sequence]) -> list[Sequence]:
        """Return the sequences in the length group of the oldest one; defer all others."""
        key = self._key(min(sequences, key=lambda q: q.age))
        self._defer(q for q in sequences if self._key(q) != key)
        return [q for q in sequences if self._key(q) == key]

    def _key(self, q: Sequence) -> Key:
        return (super()._key(q)[0], q.has_images)

    def _decode_tokens(self, q: Sequence) -> int:
        return q.length

    def _known_tokens(self, q: Sequence) -> int:
        return q.computed

    def _prompt_ran(self, q: Sequence) -> None:
        q.state = SequenceState.COMPLETION
