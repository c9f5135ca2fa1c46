"""The PagedAttention scheduler of EricLBuehler/mistral.rs, from 2025-05 to 2026-07, bugs included.

Seven states of one file of that repository. ``seed`` has a block engine of its own and is written
out in full; the others share the rules of ``bucketed`` and differ where their ``Rules`` differ;
``pr2034july`` changed the shape of the decision and overrides two methods.

Common to all: waiting requests go before decodes; a batch is all prefill or all decode; a
preempted sequence keeps its tokens, goes to the front of the queue and prefills them all again; the
engine never rejects a request at arrival and does not notice when a client goes away.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le

from simkv.core.blocks import BlockPool
from simkv.core.prefix import BlockKeys, Content
from simkv.core.request import Prompt
from simkv.core.scheduler import (
    MOST_BLOCK_SIZE,
    MOST_BLOCKS,
    Batch,
    Completion,
    Held,
    Livelock,
    Need,
    Variant,
    Why,
    blocks_for,
)

VariantName = Literal["seed", "bucketed", "pr2031a", "pr2031", "pr2034", "pr2034july", "merged2250"]


@dataclass(frozen=True)
class MistralrsConfig:
    """Knobs of the engine, under its own names.

    ``block_size`` in tokens; ``num_gpu_blocks`` as given to the engine: all but ``seed`` keep one
    of them as a null block. ``waiting_timeout`` counts failed admission attempts of the head of
    the queue before it may evict (a constant 64 in the engine). The two ``prefill_batch`` limits
    exist in ``pr2034`` only. Prefix caching is off by default here, unlike in the engine, because
    a workload has to say which prompts share what.
    """

    name: Literal["mistralrs"] = "mistralrs"
    variant: VariantName = "merged2250"
    block_size: Annotated[int, Gt(0), Le(MOST_BLOCK_SIZE)] = 32
    num_gpu_blocks: Annotated[int, Gt(1), Le(MOST_BLOCKS)] = 1024
    max_num_seqs: Annotated[int, Gt(0)] = 16
    prefix_caching: bool = False
    waiting_timeout: Annotated[int, Ge(0)] = 64
    prefill_batch_max_seqs: Annotated[int, Gt(0)] = 10
    prefill_batch_max_tokens: Annotated[int, Gt(0)] = 16384

    def __post_init__(self) -> None:
        if self.variant == "seed" and self.prefix_caching:
            raise ValueError("prefix_caching: variant 'seed' has no prefix cache; use false")


@dataclass(frozen=True)
class Rules:
    """Where the variants that have a KV manager differ from each other."""

    #: Order of decodes by arrival; victims are taken from the other end.
    decode_order: Literal["newest first", "oldest first"] = "newest first"
    #: What becomes of running sequences whose length is not the chosen one.
    unequal_decodes: Literal["preempt", "wait", "run together"] = "preempt"
    #: Which length group runs.
    bucket: Literal["shortest", "oldest"] = "shortest"
    #: Whether prompts with and without images may be admitted in one call.
    mixed_prefill: bool = False
    #: A running sequence whose modality is not that of the first of the batch.
    mixed_decode: Literal["look again", "run together", "append"] = "look again"
    #: After the waiting timeout: evict one sequence, or go on until the head fits.
    evict: Literal["one", "until it fits"] = "one"
    #: Whether ``prefill_batch_max_seqs`` and ``prefill_batch_max_tokens`` apply.
    prefill_limit: bool = False


BUCKETED = Rules()
RULES: Mapping[str, Rules] = {
    "bucketed": BUCKETED,
    "merged2250": replace(BUCKETED, decode_order="oldest first"),
    "pr2031a": replace(BUCKETED, unequal_decodes="run together", mixed_decode="run together"),
    "pr2031": replace(BUCKETED, unequal_decodes="wait"),
    "pr2034": Rules(
        decode_order="oldest first",
        unequal_decodes="run together",
        bucket="oldest",
        mixed_decode="append",
        evict="until it fits",
        prefill_limit=True,
    ),
    "pr2034july": Rules(decode_order="oldest first", bucket="oldest", mixed_prefill=True),
}
#: The rules that ``pr2034july`` looks at; the others are in methods that it overrides.
JULY_RULES = ("mixed_prefill", "evict", "prefill_limit")

VARIANTS: Mapping[str, Variant] = {
    "seed": Variant(
        "EricLBuehler/mistral.rs@b95c8ecb7 (2025-05-29, #1388)",
        "no length buckets; evicts the oldest; livelocks when the head waits too long",
    ),
    "bucketed": Variant(
        "EricLBuehler/mistral.rs@97708f210 (2026-03-14)",
        "only one length runs, all others are preempted and prefilled again",
    ),
    "pr2031a": Variant(
        "EricLBuehler/mistral.rs@0773c31ad (2026-03-25, first commit of #2031)",
        "decodes of all lengths run together",
    ),
    "pr2031": Variant(
        "EricLBuehler/mistral.rs@b8d859db1 (2026-03-25, head of #2031)",
        "decodes of other lengths wait with their KV",
    ),
    "pr2034": Variant(
        "EricLBuehler/mistral.rs@5e7dad2e9 (2026-04-02, #2034 as re-applied in #2047)",
        "oldest first, no decode buckets, prefill batches limited",
    ),
    "pr2034july": Variant(
        "EricLBuehler/mistral.rs@72710c751 (2026-07-12, head of #2034)",
        "the oldest decides the length that runs; others wait with their KV",
    ),
    "merged2250": Variant(
        "EricLBuehler/mistral.rs@bf86b7184 (2026-06-25, #2250)",
        "bucketed, but the newest is evicted first",
    ),
}


class State(Enum):
    """States of a sequence that the rules look at; DONE and IGNORED count as finished."""

    WAITING = "waiting"
    PROMPT = "prompt"
    COMPLETION = "completion"
    DONE = "done"
    IGNORED = "ignored"


FINISHED = (State.DONE, State.IGNORED)


@dataclass(slots=True, eq=False)
class Sequence:
    """A request in the engine: ``length`` is prompt plus emitted tokens, ``prefix`` the tokens
    that a prefix-cache hit spares, ``computed`` those that have KV, ``failures`` the failed
    admission attempts, ``registered`` the leading blocks offered to the prefix cache."""

    prompt: Prompt
    length: int
    content: Content
    state: State = State.WAITING
    prefix: int = 0
    computed: int = 0
    failures: int = 0
    registered: int = 0
    keys: list[int] = field(default_factory=list)

    @property
    def id(self) -> int:
        return self.prompt.id

    @property
    def has_images(self) -> bool:
        return self.prompt.has_images

    @property
    def age(self) -> tuple[float, int]:
        return (self.prompt.arrival, self.prompt.id)


Key = tuple[int, bool]
FOREVER = 1 << 62


def differs(q: Sequence, batch: list[Sequence]) -> bool:
    """Whether the first of ``batch`` has images and ``q`` has not, or the other way round."""
    return bool(batch) and batch[0].has_images != q.has_images


def build(config: MistralrsConfig, rules: Rules | None = None) -> Queues:
    """The scheduler of ``config.variant``, or one that differs from it in its ``rules``.

    ``seed`` has none that could differ.
    """
    if config.variant == "seed":
        return Seed(config)
    if config.variant == "pr2034july":
        return July(config, rules)
    return Bucketed(config, rules)


class Queues:
    """What all variants share: the two queues, the pool, and the engine's hook after a step."""

    pipeline_depth = 1
    #: A decode takes a block when the length is this much beyond a multiple of the block size.
    border = 0

    def __init__(self, config: MistralrsConfig, usable_blocks: int) -> None:
        self.config = config
        self.pool = BlockPool(usable_blocks)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._live: dict[int, Sequence] = {}
        self._batch = Batch()
        self._chosen: list[Sequence] = []
        self._why: Why = "deferred"  # the head of the queue was passed over, if it was

    def add(self, prompt: Prompt) -> None:
        sequence = Sequence(prompt, prompt.prompt_tokens, Content(prompt))
        self._live[prompt.id] = sequence
        self.waiting.append(sequence)

    def abort(self, request_id: int) -> None:
        """Nothing: these versions keep serving a client that is gone."""

    def schedule(self) -> Batch:
        """One call of the engine's schedule function, and the engine's look at the result."""
        batch = self._batch = Batch()
        self._why = "deferred"
        chosen = self._chosen = self._choose()
        if chosen:
            # The engine looks at the first sequence only, whatever the others are.
            prefill = chosen[0].state is State.PROMPT
            batch.kind = "prefill" if prefill else "decode"
            for q in chosen:
                new = q.length - q.prefix if prefill else 1
                batch.scheduled.append((q.id, new))
                batch.context.append(q.length - new)
                batch.emits.append(q.id)
            batch.fatal = self._fatal(chosen, prefill)
        if batch.preempted or batch.ignored:
            batch.lost = self._lost()
        if self.waiting:
            batch.held = Held(self.waiting[0].id, self._why)
        return batch

    def complete(self, batch: Batch, ended: Collection[int]) -> Completion:
        """Give every sequence of the batch its token, then drop the finished from ``running``.

        After a wrong pop a sequence can stand in ``waiting`` more than once. A copy that is left
        when it has ended is prefilled once more, for a token that nobody gets.
        """
        delivered = [i for i in batch.emits if i in self._live]
        for q in self._chosen:
            q.computed = q.length
            q.length += 1
            if q.id in ended or q.id not in self._live:
                q.state = State.DONE
            elif q.state is State.PROMPT:
                self._prompt_ran(q)
        finished = [q for q in self.running if q.state in FINISHED]
        if finished:
            self.running = [q for q in self.running if q.state not in FINISHED]
        for q in finished:
            self._free_finished(q)
            self._live.pop(q.id, None)
        return Completion(delivered, [q.id for q in finished if q.state is State.DONE])

    @property
    def num_blocks(self) -> int:
        return self.pool.num_blocks

    @property
    def free_blocks(self) -> int:
        return self.pool.free

    @property
    def num_waiting(self) -> int:
        return len(self.waiting)

    @property
    def num_running(self) -> int:
        return len(self.running)

    def leap(self, most: int) -> int:
        """Decodes alone, while the queue may not move and nobody needs a block that is not there.

        With a prefix cache every step registers blocks, so there is no leaping.
        """
        batch = self._batch
        if batch.kind != "decode" or batch.preempted or self.config.prefix_caching:
            return 1
        if (self.waiting and not self._capped()) or self._order_flips():
            return 1
        steps, free = 1, self.pool.free
        for needed in self._borders(min(most, self._meets_others()) - 1):
            free -= needed
            if free < 0:
                break
            steps += 1
        return steps

    def skip(self, steps: int) -> list[int]:
        free, left = [], self.pool.free
        for needed in self._borders(steps):
            left -= needed
            free.append(left)
        for q in self._chosen:
            self.pool.take(q.id, sum(self._borders_of(q, steps)))
            q.length += steps
            q.computed = q.length - 1
        return free

    def waiting_ids(self) -> list[int]:
        return [q.id for q in self.waiting]

    def running_ids(self) -> list[int]:
        return [q.id for q in self.running]

    def blocks_held(self) -> Mapping[int, int]:
        return {owner: len(table) for owner, table in self.pool.tables.items()}

    def fingerprint(self) -> Hashable:
        expired = self.config.waiting_timeout + 2
        queues = (self.waiting, self.running)
        states = (
            tuple((q.id, q.state, q.length, min(q.failures, expired)) for q in queue)
            for queue in queues
        )
        return (*states, self.pool.fingerprint())

    def _choose(self) -> list[Sequence]:
        raise NotImplementedError

    def _order_flips(self) -> bool:
        """Whether reversing a stable sort puts equal arrivals the other way round in each step."""
        return len({q.prompt.arrival for q in self.running}) < len(self.running)

    def _capped(self) -> bool:
        """Whether so many run that the queue is not even looked at."""
        raise NotImplementedError

    def _meets_others(self) -> int:
        """Steps until the batch is as long as running sequences that are not in it."""
        return FOREVER

    def _borders_of(self, q: Sequence, steps: int) -> list[int]:
        """Blocks (0 or 1) that ``q`` needs in each of the next steps, if it decodes in all."""
        size, first = self.config.block_size, q.length + 1 - self.border
        return [int((first + step) % size == 0) for step in range(steps)]

    def _borders(self, steps: int) -> list[int]:
        per_sequence = [self._borders_of(q, steps) for q in self._chosen]
        return [sum(needed) for needed in zip(*per_sequence, strict=True)]

    def _prompt_ran(self, q: Sequence) -> None:
        """A prefill of ``q`` has run; only ``pr2034july`` changes the state here."""

    def _free_finished(self, q: Sequence) -> None:
        self.pool.release(q.id)

    def _defer(self, others: Iterable[Sequence]) -> None:
        self._batch.aside.update(dict.fromkeys((q.id for q in others), "deferred"))

    def _ignore(self, q: Sequence) -> None:
        q.state = State.IGNORED
        self._batch.ignored.append(q.id)

    def _fatal(self, chosen: list[Sequence], prefill: bool) -> str | None:
        """Batches on which the engine dies."""
        if len(set(chosen)) < len(chosen):
            ids = [q.id for q in chosen]
            return f"self-deadlock: the scheduled batch holds the same sequence twice {ids}"
        if not prefill:
            for q in chosen:
                if not self.pool.held(q.id):
                    return f"panic: sequence {q.id} is in a completion batch without blocks"
        return None

    def _lost(self) -> list[int]:
        """Sequences that stand in no queue any more though nothing ended them."""
        queued = {q.id for q in self.waiting} | {q.id for q in self.running}
        gone = [i for i in self._live if i not in queued]
        lost = [i for i in gone if self._live[i].state not in FINISHED]
        for i in gone:
            del self._live[i]
        return lost


class Seed(Queues):
    """The scheduler before length buckets, with a block engine that counts a slot ahead."""

    def __init__(self, config: MistralrsConfig) -> None:
        super().__init__(config, config.num_gpu_blocks)

    def _choose(self) -> list[Sequence]:
        scheduled = self._admit()
        return self._decode() if scheduled is None else scheduled

    def _admit(self) -> list[Sequence] | None:
        """Move waiting sequences to running while they fit; None if the decodes may go on."""
        scheduled: list[Sequence] = []
        again: list[Sequence] = []
        ignored = False  # never reset within a call: one ignored head takes the rest with it
        watch = Circle()
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
            if differs(q, scheduled):
                again.append(self.waiting.popleft())
                continue
            if not ignored:
                q.state = State.PROMPT
                self.pool.abandon(q.id)  # a table that it already had is overwritten and leaks
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
        watch = Circle()
        while todo:
            q = todo.popleft()
            while self._append_need(q) > self.pool.free:
                if not todo:
                    self._preempt(q, q)
                    break
                self._preempt(todo.pop(), q)
            else:
                self.pool.take(q.id, self._append_need(q))
                if not differs(q, keep):
                    keep.append(q)
                else:
                    todo.append(q)
                    watch.look((tuple(todo), self.pool.free), [*keep, *todo], MIXED_DECODE)
        self.running = keep
        for q in keep:
            q.state = State.COMPLETION
        return list(keep)

    def _capped(self) -> bool:
        return len(self.running) + 1 == self.config.max_num_seqs

    def _need(self, q: Sequence) -> int:
        """Blocks for all tokens and the next one."""
        return q.length // self.config.block_size + 1

    def _can_allocate(self, q: Sequence) -> Literal["ok", "later", "impossible"]:
        """Every "later" counts against ``q`` for the rest of its life."""
        if self._need(q) > self.pool.num_blocks:
            return "impossible"
        if self._need(q) > self.pool.free:
            q.failures += 1
            return "later"
        return "ok"

    def _append_need(self, q: Sequence) -> int:
        """One block at a block border; none for a sequence that has no table at all."""
        return int(self.pool.held(q.id) > 0 and q.length % self.config.block_size == 0)

    def _preempt(self, q: Sequence, by: Sequence, why: Need = "blocks") -> None:
        q.state = State.WAITING
        self.pool.release(q.id)
        self.waiting.appendleft(q)
        self._batch.preempt(q.id, by.id, why)
        self._why = "blocks"


class Bucketed(Queues):
    """The scheduler on top of the KV manager; ``RULES`` says how its variants differ."""

    def __init__(self, config: MistralrsConfig, rules: Rules | None = None) -> None:
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
            if not self.rules.mixed_prefill and differs(q, scheduled):
                if not ignored:
                    self.pool.release(q.id)
                again.append(self.waiting.popleft())
                continue
            if not ignored:
                q.state = State.PROMPT
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
            return FOREVER
        length, images = self._key(self._chosen[0])
        ahead = [key[0] - length for key in map(self._key, self.running) if key[1] == images]
        return min((steps for steps in ahead if steps > 0), default=FOREVER)

    def _evict_for(self, q: Sequence, hit: list[int]) -> bool:
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
        watch = Circle()
        while todo:
            q = todo.popleft()
            if not self._grows(q, todo):
                continue
            if self.rules.mixed_decode == "run together" or not differs(q, keep):
                keep.append(q)
            elif self.rules.mixed_decode == "append":
                appended.append(q)
            else:
                todo.append(q)
                watch.look((tuple(todo), self.pool.free), [*keep, *todo], MIXED_DECODE)
        self.running = keep + appended
        chosen = self.running
        if self.rules.unequal_decodes != "run together":
            chosen, others = self._bucket(keep)
            if self.rules.unequal_decodes == "preempt":
                self._bounce(others, chosen)
            else:
                self._defer(others)
                self.running = others + chosen + appended
        for q in self.running:
            q.state = State.COMPLETION
            self._register(q, q.length)
        return list(chosen)

    def _grows(self, q: Sequence, todo: deque[Sequence]) -> bool:
        """Room for the next token, taken from the far end of ``todo`` if need be."""
        while not self._allocate(q, self._decode_tokens(q)):
            if not todo:
                self._preempt(q, q)
                return False
            self._preempt(todo.pop(), q)
        return True

    def _decode_order(self) -> list[Sequence]:
        order = sorted(self.running, key=lambda q: q.prompt.arrival)
        return order if self.rules.decode_order == "oldest first" else order[::-1]

    def _decode_tokens(self, q: Sequence) -> int:
        """KV slots that a decode asks for: one ahead of the token that it writes."""
        return q.length + 1

    def _key(self, q: Sequence) -> Key:
        if q.state is State.PROMPT:
            return (q.length - q.prefix, q.has_images)
        return (q.length, False)

    def _bucket(self, sequences: list[Sequence]) -> tuple[list[Sequence], list[Sequence]]:
        """The group of equal length that runs, and all others, group by group, last first."""
        groups: dict[Key, list[Sequence]] = {}
        for q in sequences:
            groups.setdefault(self._key(q), []).append(q)
        if len(groups) <= 1:
            return sequences, []
        if self.rules.bucket == "shortest":
            chosen = min(groups, key=lambda key: key[0])
        else:
            chosen = min(groups, key=lambda key: min(q.prompt.arrival for q in groups[key]))
        running = groups.pop(chosen)
        return running, [q for group in groups.values() for q in reversed(group)]

    def _bounce(self, others: list[Sequence], chosen: list[Sequence]) -> None:
        for q in others:
            self._preempt(q, chosen[0], "bucket")
        self._defer(others)
        gone = set(others)
        self.running = [q for q in self.running if q not in gone]

    def _preempt(self, q: Sequence, by: Sequence, why: Need = "blocks") -> None:
        if q.state in FINISHED:
            return
        q.state = State.WAITING
        q.prefix = 0
        self._register(q, self._known_tokens(q))
        self._release(q)
        self.waiting.appendleft(q)
        self._batch.preempt(q.id, by.id, why)
        self._why = "deferred" if why == "bucket" else "blocks"

    def _free_finished(self, q: Sequence) -> None:
        self._register(q, self._known_tokens(q))
        self._release(q)

    def _admits(self, q: Sequence, hit: list[int]) -> bool:
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

    def _lookup(self, q: Sequence) -> list[int]:
        """Cached blocks of the prompt; its last token is always computed."""
        if not self.config.prefix_caching:
            return []
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
        table = self.pool.tables.get(q.id, [])
        full = min(tokens // self.config.block_size, len(table))
        for index in range(q.registered, full):
            self.pool.register(table[index], q.keys[index])
        q.registered = max(q.registered, full)


class July(Bucketed):
    """The later design of pull request 2034: one length runs, the others keep their KV and wait."""

    border = 1

    def _choose(self) -> list[Sequence]:
        prompts = [q for q in self.running if q.state is State.PROMPT]
        if prompts:
            self._why = "rule"  # the queue is not looked at until they have run
            return self._like_the_oldest(prompts)
        admitted = self._admit()
        if admitted:
            return self._like_the_oldest(admitted)
        return self._decode()

    def _decode(self) -> list[Sequence]:
        todo = deque(sorted(self.running, key=lambda q: q.age))
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
        q.state = State.COMPLETION


MIXED_DECODE = "running sequences with and without images are queued again for ever"


class Circle:
    """Raises Livelock when a loop inside one call comes back to a state that it has been in."""

    def __init__(self) -> None:
        self._seen: set[Hashable] = set()

    def look(self, state: Hashable, sequences: Iterable[Sequence], why: str) -> None:
        if state in self._seen:
            raise Livelock(why, sorted({q.id for q in sequences}))
        self._seen.add(state)
