"""Common parts of mistral.rs's schedulers: sequences, the queues, and the end of a step."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from simkv.core.block_keys import TokenContent
from simkv.core.block_pool import BlockPool, UnnumberedPool
from simkv.core.request import Prompt
from simkv.core.scheduler_protocol import (
    Batch,
    Completion,
    Held,
    Livelock,
    WaitReason,
)
from simkv.schedulers.mistralrs.config import MistralrsConfig


class SequenceState(Enum):
    """State of a sequence in the engine; DONE and IGNORED count as finished."""

    WAITING = "waiting"
    PROMPT = "prompt"
    COMPLETION = "completion"
    DONE = "done"
    IGNORED = "ignored"


FINISHED = (SequenceState.DONE, SequenceState.IGNORED)


@dataclass(slots=True, eq=False)
class Sequence:
    """A request in the engine.

    - ``length``: number of prompt and output tokens.
    - ``computed``: number of tokens whose KV is computed.
    - ``prefix``: number of tokens found in the prefix cache.
    - ``failures``: number of failed admission attempts.
    - ``registered``: number of blocks registered in the prefix cache.
    """

    prompt: Prompt
    length: int
    content: TokenContent
    state: SequenceState = SequenceState.WAITING
    prefix: int = 0
    computed: int = 0
    failures: int = 0
    registered: int = 0
    keys: array[int] = field(default_factory=lambda: array("q"))

    @property
    def id(self) -> int:
        return self.prompt.id

    @property
    def has_images(self) -> bool:
        return self.prompt.has_images

    @property
    def age(self) -> tuple[float, int]:
        return (self.prompt.arrival, self.prompt.id)


UNLIMITED_STEPS = 1 << 62


def has_other_modality(q: Sequence, batch: list[Sequence]) -> bool:
    """Return whether only one of ``q`` and the first sequence of ``batch`` has images."""
    return bool(batch) and batch[0].has_images != q.has_images


class MistralrsScheduler:
    """Base class of the schedulers, with the queues and the block pool."""

    pipeline_depth = 1
    #: A decode needs a new block when the sequence length exceeds a multiple of the block size by
    #: this number of tokens.
    border = 0

    def __init__(self, config: MistralrsConfig, usable_blocks: int) -> None:
        self.config = config
        self.pool = (BlockPool if config.prefix_caching else UnnumberedPool)(usable_blocks)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._live: dict[int, Sequence] = {}
        self._batch = Batch()
        self._chosen: list[Sequence] = []
        self._why: WaitReason = "deferred"  # reason why the head of the queue was not admitted

    def add(self, prompt: Prompt) -> None:
        sequence = Sequence(prompt, prompt.prompt_tokens, TokenContent(prompt))
        self._live[prompt.id] = sequence
        self.waiting.append(sequence)

    def abort(self, request_id: int) -> None:
        """Do nothing: mistral.rs serves a request to its end even if its client disconnects."""

    def schedule(self) -> Batch:
        """Make a scheduling decision and return the batch."""
        batch = self._batch = Batch()
        self._why = "deferred"
        chosen = self._chosen = self._choose()
        if chosen:
            # The engine checks only the first sequence to decide between prefill and decode.
            prefill = chosen[0].state is SequenceState.PROMPT
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
        """Append a token to every sequence of the batch and remove finished sequences."""
        # An engine bug can put a sequence into ``waiting`` more than once. If a copy is still there
        # when the sequence has finished, it is prefilled once more and its token is discarded.
        delivered = [i for i in batch.emits if i in self._live]
        for q in self._chosen:
            q.computed = q.length
            q.length += 1
            if q.id in ended or q.id not in self._live:
                q.state = SequenceState.DONE
            elif q.state is SequenceState.PROMPT:
                self._prompt_ran(q)
        finished = [q for q in self.running if q.state in FINISHED]
        if finished:
            self.running = [q for q in self.running if q.state not in FINISHED]
        for q in finished:
            self._free_finished(q)
            self._live.pop(q.id, None)
        return Completion(delivered, [q.id for q in finished if q.state is SequenceState.DONE])

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
        """Return the number of decode-only steps until the queues change or blocks run out."""
        batch = self._batch
        if self._counts_failures():
            left = self.config.waiting_timeout - self.waiting[0].failures
            return max(1, min(most, 1 + left))
        if batch.kind != "decode" or batch.preempted:
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

    def _counts_failures(self) -> bool:
        """Return whether a step changes the queue only by one more failed admission of its head."""
        batch = self._batch
        something = batch or batch.preempted or batch.ignored or batch.lost or batch.aside
        waits = self.waiting and not self.running and self._why == "blocks"
        return bool(waits and not something)

    def skip(self, steps: int) -> list[int]:
        if self._counts_failures():
            self.waiting[0].failures += steps
            return [self.pool.free] * steps
        free, left = [], self.pool.free
        for needed in self._borders(steps):
            left -= needed
            free.append(left)
        self._decode_on(steps)
        return free

    def _decode_on(self, steps: int) -> None:
        for q in self._chosen:
            self.pool.take(q.id, sum(self._borders_of(q, steps)))
            q.length += steps
            q.computed = q.length - 1

    def waiting_ids(self) -> list[int]:
        return [q.id for q in self.waiting]

    def running_ids(self) -> list[int]:
        return [q.id for q in self.running]

    def blocks_held(self) -> Mapping[int, int]:
        return self.pool.holdings()

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
        """Return whether sequences of equal arrival time swap their order in every step.

        The order changes because the engine reverses the result of a stable sort.
        """
        return len({q.prompt.arrival for q in self.running}) < len(self.running)

    def _capped(self) -> bool:
        """Return whether the number of running sequences is at its limit, so that none is
        admitted.
        """
        raise NotImplementedError

    def _meets_others(self) -> int:
        """Return the number of steps until the batch reaches the length of a running sequence
        outside it.
        """
        return UNLIMITED_STEPS

    def _borders_of(self, q: Sequence, steps: int) -> list[int]:
        """Return the number of blocks (0 or 1) that ``q`` needs in each of the next decode
        steps.
        """
        size, first = self.config.block_size, q.length + 1 - self.border
        return [int((first + step) % size == 0) for step in range(steps)]

    def _borders(self, steps: int) -> list[int]:
        per_sequence = [self._borders_of(q, steps) for q in self._chosen]
        return [sum(needed) for needed in zip(*per_sequence, strict=True)]

    def _prompt_ran(self, q: Sequence) -> None:
        """Update ``q`` after its prefill; only ``pr2034july`` changes the state at this point."""

    def _free_finished(self, q: Sequence) -> None:
        self.pool.release(q.id)

    def _defer(self, others: Iterable[Sequence]) -> None:
        self._batch.aside.update(dict.fromkeys((q.id for q in others), "deferred"))

    def _ignore(self, q: Sequence) -> None:
        q.state = SequenceState.IGNORED
        self._batch.ignored.append(q.id)

    def _fatal(self, chosen: list[Sequence], prefill: bool) -> str | None:
        """Return the error message if the engine crashes on this batch, else None."""
        if len(set(chosen)) < len(chosen):
            ids = [q.id for q in chosen]
            return f"self-deadlock: the scheduled batch holds the same sequence twice {ids}"
        if not prefill:
            for q in chosen:
                if not self.pool.held(q.id):
                    return f"panic: sequence {q.id} is in a completion batch without blocks"
        return None

    def _lost(self) -> list[int]:
        """Drop sequences that are in no queue. Return the ids of unfinished ones.

        Only a sequence that was preempted or ignored in this call can be in no queue.
        """
        queued, live = {*self.waiting, *self.running}, self._live
        left = dict.fromkeys((*self._batch.preempted, *self._batch.ignored))
        gone = [i for i in left if i in live and live[i] not in queued]
        if len(gone) > 1:
            gone.sort(key=list(live).index)
        lost = [i for i in gone if live[i].state not in FINISHED]
        for i in gone:
            del live[i]
        return lost


MIXED_DECODE = "running sequences with and without images are queued again forever"


class LoopGuard:
    """Detector of endless loops within one ``schedule`` call.

    Raises Livelock if the loop returns to an earlier state.
    """

    def __init__(self) -> None:
        self._seen: set[Hashable] = set()

    def look(self, state: Hashable, sequences: Iterable[Sequence], why: str) -> None:
        if state in self._seen:
            raise Livelock(why, sorted({q.id for q in sequences}))
        self._seen.add(state)
