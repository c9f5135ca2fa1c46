"""What a scheduler of one's own may start from: two queues, a block pool, all that simkv asks.

class Fcfs(OwnScheduler):
    config: OwnConfig

    def decide(self, batch: Batch) -> None:
        for r in [*self.running, *self.waiting]:
            if self.fits(r, r.left):
                self.compute(batch, r, r.left)
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

from simkv.core.block_pool import BlockPool
from simkv.core.request import Prompt
from simkv.core.scheduler_protocol import (
    Batch,
    BatchKind,
    Completion,
    Held,
    blocks_for,
)

__all__ = [
    "Batch",
    "BlockPool",
    "Completion",
    "CustomConfig",
    "CustomRequest",
    "CustomScheduler",
    "Held",
    "Prompt",
    "blocks_for",
]


@dataclass(frozen=True)
class CustomConfig:
    """The knobs that every scheduler of one's own has; a subclass adds its own."""

    num_blocks: int = 512
    """Blocks of KV cache."""
    block_size: int = 16
    """Tokens in a block of KV."""
    max_num_seqs: int = 256
    """Requests that may run at a time."""
    max_num_batched_tokens: int = 2048
    """Tokens that a step may compute."""

    def __post_init__(self) -> None:
        """Raise ValueError for what cannot be."""
        for name in ("num_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: {getattr(self, name)}; expected at least 1")


@dataclass(slots=True, eq=False)
class CustomRequest:
    """A request as a scheduler sees it: ``computed`` of its tokens have KV, ``emitted`` were sent.

    ``preemptions`` is how often its KV was taken back, ``waited`` how many decisions it stood in
    the queue.
    """

    prompt: Prompt
    computed: int = 0
    emitted: int = 0
    preemptions: int = 0
    waited: int = 0

    @property
    def id(self) -> int:
        """Its number."""
        return self.prompt.id

    @property
    def length(self) -> int:
        """Tokens that it has: the prompt's and those that were sent."""
        return self.prompt.prompt_tokens + self.emitted

    @property
    def left(self) -> int:
        """Tokens to compute until the next one comes; 1 for a decode."""
        return self.length - self.computed


class CustomScheduler:
    """Whose ``decide`` fills a batch, by ``compute`` and ``preempt``; the rest is done here.

    ``waiting`` and ``running`` are in the order of arrival unless ``decide`` reorders them.
    """

    config: CustomConfig
    pipeline_depth = 1

    def __init__(self, config: Any) -> None:
        self.config = config
        self.pool = BlockPool(config.num_blocks)
        self.waiting: list[CustomRequest] = []
        self.running: list[CustomRequest] = []

    def decide(self, batch: Batch) -> None:
        """Choose what the next step computes; to be written."""
        raise NotImplementedError("decide(self, batch) is to be written")

    def blocks(self, r: CustomRequest, tokens: int) -> int:
        """Blocks that a request needs more to have so many tokens computed on top."""
        wanted = blocks_for(r.computed + tokens, self.config.block_size)
        return wanted - self.pool.held(r.id)

    def fits(self, r: CustomRequest, tokens: int) -> bool:
        """Whether the blocks for so many more tokens of a request are free."""
        return self.blocks(r, tokens) <= self.pool.free

    def compute(self, batch: Batch, r: CustomRequest, tokens: int) -> None:
        """Let the step compute so many tokens of a request; one that waits runs from now on."""
        if r in self.waiting:
            self.waiting.remove(r)
            self.running.append(r)
        self.pool.take(r.id, self.blocks(r, tokens))
        batch.scheduled.append((r.id, tokens))
        batch.context.append(r.computed)
        r.computed += tokens
        if r.left == 0:
            batch.emits.append(r.id)

    def preempt(self, batch: Batch, victim: CustomRequest, by: CustomRequest | None = None) -> None:
        """Take a running request's blocks back; it waits at the head of the queue, from scratch."""
        self.running.remove(victim)
        self.pool.release(victim.id)
        victim.computed = 0
        victim.preemptions += 1
        self.waiting.insert(0, victim)
        batch.preempt(victim.id, by.id if by else None)

    def add(self, prompt: Prompt) -> None:
        """Take a new request."""
        self.waiting.append(CustomRequest(prompt))

    def schedule(self) -> Batch:
        """The next step."""
        batch = Batch()
        self.decide(batch)
        for r in self.waiting:
            r.waited += 1
        batch.kind = self._kind(batch)
        return batch

    def _kind(self, batch: Batch) -> BatchKind:
        sent = {r.id: r.emitted for r in self.running}
        decodes = [n == 1 and sent.get(i, 0) > 0 for i, n in batch.scheduled]
        if not decodes:
            return "idle"
        return "decode" if all(decodes) else "mixed" if any(decodes) else "prefill"

    def complete(self, batch: Batch, ended: Collection[int]) -> Completion:
        """Give the batch's requests their tokens; those that end are gone."""
        sent = set(batch.emits)
        finished = []
        for r in list(self.running):
            if r.id not in sent:
                continue
            r.emitted += 1
            if r.id in ended or r.emitted >= r.prompt.max_tokens:
                self._remove(r)
                finished.append(r.id)
        return Completion(list(batch.emits), finished)

    def abort(self, request_id: int) -> None:
        """The client of a request has gone."""
        for r in [*self.waiting, *self.running]:
            if r.id == request_id:
                self._remove(r)

    def _remove(self, r: CustomRequest) -> None:
        self.pool.release(r.id)
        (self.running if r in self.running else self.waiting).remove(r)

    @property
    def num_blocks(self) -> int:
        """Blocks in all."""
        return self.pool.num_blocks

    @property
    def free_blocks(self) -> int:
        """Blocks that nobody holds."""
        return self.pool.free

    @property
    def num_waiting(self) -> int:
        """Length of the queue."""
        return len(self.waiting)

    @property
    def num_running(self) -> int:
        """How many run."""
        return len(self.running)

    def leap(self, most: int) -> int:  # noqa: ARG002
        """For how many steps the same batch would come again; 1 is always true."""
        return 1

    def skip(self, steps: int) -> list[int]:
        """What a scheduler that says more than 1 has to do for so many steps."""
        raise NotImplementedError("skip(self, steps) is to be written where leap says more than 1")

    def waiting_ids(self) -> list[int]:
        """Who waits, the head first."""
        return [r.id for r in self.waiting]

    def running_ids(self) -> list[int]:
        """Who runs."""
        return [r.id for r in self.running]

    def blocks_held(self) -> Mapping[int, int]:
        """Blocks by request."""
        return self.pool.holdings()

    def fingerprint(self) -> Hashable:
        """All that decides what comes next; what else ``decide`` keeps in mind belongs here."""
        rows = [(r.id, r.computed, r.emitted) for r in (*self.running, *self.waiting)]
        return tuple(rows), len(self.waiting), self.pool.free
