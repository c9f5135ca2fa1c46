"""Base class of custom schedulers: two queues, a block pool and the scheduler protocol.

class Fcfs(CustomScheduler):
    config: CustomConfig

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
    """Settings that every custom scheduler has; subclasses add more settings."""

    num_blocks: int = 512
    """Number of KV cache blocks."""
    block_size: int = 16
    """Tokens per KV block."""
    max_num_seqs: int = 256
    """Maximum number of running requests."""
    max_num_batched_tokens: int = 2048
    """Maximum number of tokens per step."""

    def __post_init__(self) -> None:
        """Raise ValueError if a setting is below 1."""
        for name in ("num_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: must be at least 1, got {getattr(self, name)}")


@dataclass(slots=True, eq=False)
class CustomRequest:
    """Request as a scheduler sees it.

    ``computed`` is the number of tokens with computed KV. ``emitted`` is the number of tokens sent
    to the client. ``waited`` is the number of steps that the request has spent in the queue.
    """

    prompt: Prompt
    computed: int = 0
    emitted: int = 0
    preemptions: int = 0
    waited: int = 0

    @property
    def id(self) -> int:
        """Request id."""
        return self.prompt.id

    @property
    def length(self) -> int:
        """Number of prompt tokens and emitted tokens in total."""
        return self.prompt.prompt_tokens + self.emitted

    @property
    def left(self) -> int:
        """Number of tokens to compute before the next token is emitted; 1 during decode."""
        return self.length - self.computed


class CustomScheduler:
    """Base class of custom schedulers.

    Subclasses implement ``decide``, which calls ``compute`` and ``preempt``. ``waiting`` and
    ``running`` are lists of requests in order of arrival.
    """

    config: CustomConfig
    pipeline_depth = 1

    def __init__(self, config: Any) -> None:
        self.config = config
        self.pool = BlockPool(config.num_blocks)
        self.waiting: list[CustomRequest] = []
        self.running: list[CustomRequest] = []

    def decide(self, batch: Batch) -> None:
        """Select the tokens to compute in the next step; subclasses implement this."""
        raise NotImplementedError("the scheduler must implement decide(self, batch)")

    def blocks(self, r: CustomRequest, tokens: int) -> int:
        """Return the number of additional blocks for ``tokens`` more tokens of a request."""
        wanted = blocks_for(r.computed + tokens, self.config.block_size)
        return wanted - self.pool.held(r.id)

    def fits(self, r: CustomRequest, tokens: int) -> bool:
        """Return whether enough blocks are free for ``tokens`` more tokens of a request."""
        return self.blocks(r, tokens) <= self.pool.free

    def compute(self, batch: Batch, r: CustomRequest, tokens: int) -> None:
        """Compute ``tokens`` tokens of a request in this step. A waiting request starts to run."""
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
        """Free the blocks of a running request and move it to the head of the queue."""
        self.running.remove(victim)
        self.pool.release(victim.id)
        victim.computed = 0
        victim.preemptions += 1
        self.waiting.insert(0, victim)
        batch.preempt(victim.id, by.id if by else None)

    def add(self, prompt: Prompt) -> None:
        """Add a new request to the queue."""
        self.waiting.append(CustomRequest(prompt))

    def schedule(self) -> Batch:
        """Return the batch of the next step."""
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
        """Emit the tokens of the batch and remove requests that have ended."""
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
        """Remove a request whose client has disconnected."""
        for r in [*self.waiting, *self.running]:
            if r.id == request_id:
                self._remove(r)

    def _remove(self, r: CustomRequest) -> None:
        self.pool.release(r.id)
        (self.running if r in self.running else self.waiting).remove(r)

    @property
    def num_blocks(self) -> int:
        """Number of blocks."""
        return self.pool.num_blocks

    @property
    def free_blocks(self) -> int:
        """Number of free blocks."""
        return self.pool.free

    @property
    def num_waiting(self) -> int:
        """Number of waiting requests."""
        return len(self.waiting)

    @property
    def num_running(self) -> int:
        """Number of running requests."""
        return len(self.running)

    def leap(self, most: int) -> int:  # noqa: ARG002
        """Return the number of steps, at most ``most``, for which the batch stays the same.

        Subclasses may always return 1.
        """
        return 1

    def skip(self, steps: int) -> list[int]:
        """Update the state for ``steps`` identical steps.

        Subclasses whose ``leap`` returns more than 1 must implement it.
        """
        raise NotImplementedError("implement skip(self, steps), because leap returned more than 1")

    def waiting_ids(self) -> list[int]:
        """Return the ids of waiting requests, in queue order."""
        return [r.id for r in self.waiting]

    def running_ids(self) -> list[int]:
        """Return the ids of running requests."""
        return [r.id for r in self.running]

    def blocks_held(self) -> Mapping[int, int]:
        """Return the number of blocks by request id."""
        return self.pool.holdings()

    def fingerprint(self) -> Hashable:
        """Return the state that determines future batches.

        Subclasses must add their own state.
        """
        rows = [(r.id, r.computed, r.emitted) for r in (*self.running, *self.waiting)]
        return tuple(rows), len(self.waiting), self.pool.free
