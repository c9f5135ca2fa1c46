"""The PagedAttention scheduler of EricLBuehler/mistral.rs, from 2025-05 to 2026-07, bugs included.

Seven states of one file of that repository. ``seed`` has a block engine of its own and a
file of its own; the others share the rules of ``bucketed`` and differ where their
``MistralrsRules`` differ; ``pr2034july`` changed the shape of the decision and overrides two
methods.

Common to all: waiting requests go before decodes; a batch is all prefill or all decode; a
preempted sequence keeps its tokens, goes to the front of the queue and prefills them all again; the
engine never rejects a request at arrival and does not notice when a client goes away.
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
    """The scheduler on top of the KV manager; ``RULES`` says how its variants differ."""

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
            ignored = False  # an ignored head may come here again, and is then revived if it fits
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
            popped = self.waiting.popleft()  # after an eviction this is the last victim, not q
            if ignored:
                popped.failures = 0
                self.pool.release(popped.id)
                continue  # and it stands in no queue any more, ignored or not
            self.running.append(popped)
            scheduled.append(popped)
        self.waiting.extend(again)
        self._defer(again)
        return scheduled

    def _order_flips(self) -> bool:
        # Those that wait stand before those that ran, which then lose a tie for the oldest.
        turns = self.rules.unequal_decodes == "wait" and self.rules.bucket == "oldest"
        return (turns or self.rules.decode_order == "newest first") and super()._order_flips()

    def _capped(self) -> bool:
        return len(self.running) >= self.config.max_num_seqs

    def _meets_others(self) -> int:
        """Groups of equal length run together, so the batch changes when it meets another."""
        if self.rules.unequal_decodes == "run together":
            return UNLIMITED_STEPS
        # Those whose prompt was just computed were chosen by what of it was not cached.
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
        """The head has waited too long: evict until it is admitted, or give it up."""
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
        """Those of the running that decode in this step; what becomes of the others is done."""
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
        """Room for the next token, taken from the far end of ``todo`` if need be."""
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
        # A step hands out its blocks, each of which loses its key, before it registers full ones.
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
        """KV slots that a decode asks for: one ahead of the token that it writes."""
        return q.length + 1

    def _key(self, q: Sequence) -> Key:
        if q.state is SequenceState.PROMPT:
            return (q.length - q.prefix, q.has_images)
        return (q.length, False)

    def _bucket(self, sequences: list[Sequence]) -> tuple[list[Sequence], list[Sequence]]:
        """The group of equal length that runs, and all others, group by group, last first."""
        groups: dict[Key, list[Sequence]] = {}
        for q in sequences:
            groups.setdefault(self._key(q), []).append(q)
        if len(groups) <= 1:
            return sequences, []
        running = groups.pop(self._first(groups))
        return running, [q for group in groups.values() for q in reversed(group)]

    def _first(self, groups: dict[Key, list[Sequence]]) -> Key:
        """The group that runs."""
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
        """Extend the table of ``q``, or make one of cached and new blocks; all or nothing."""
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
        """Cached blocks of the prompt; its last token is always computed."""
        if not self.config.prefix_caching:
            return NO_BLOCKS
        self._keys.extend(q.keys, q.content, q.length)
        return self.pool.lookup(q.keys[: (q.length - 1) // self.config.block_size])

    def _known_tokens(self, q: Sequence) -> int:
        """Tokens that count as computed when KV goes to the prefix cache.

        All of them, also those of a prompt that never ran: later hits on these are phantoms.
        """
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
    """The later design of pull request 2034: one length runs, the others keep their KV and wait."""

    border = 1

    def _choose(self) -> list[Sequence]:
        prompts = [q for q in self.running if q.state is SequenceState.PROMPT]
        if prompts:
            self._why = "rule"  # the queue is not looked at until they have run
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
        """Those whose key is that of the oldest sequence, in the given order."""
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
