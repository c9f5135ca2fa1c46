"""The memory that FastDeploy's engine and token processor share, and what is done to it.

Queues, slots and block tables of ResourceManagerV1 without the decision itself (that is in
``fixed`` and ``ratio``), and the reader of the worker's messages. Read at
PaddlePaddle/FastDeploy@74d0f1c01 and its parent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Literal, NamedTuple

from simkv.core.actor_protocol import Message, MessageEffects
from simkv.core.block_pool import BlockPool, UnnumberedPool
from simkv.core.request import Prompt
from simkv.core.scheduler_protocol import (
    Held,
    PreemptionCause,
    WaitReason,
    blocks_for,
)
from simkv.schedulers.fastdeploy.worker import (
    EOS,
    PREEMPTED,
    TaskBatch,
    WorkerTask,
)


class SlotOverrun(RuntimeError):
    """No slot is free for a request that was just admitted; the engine logs it and goes on."""


class RequestStatus(Enum):
    """Where a request stands; RUNNING_DECODE: the engine heard a token since its prefill."""

    WAITING = "waiting"
    RUNNING = "running"
    RUNNING_DECODE = "running decode"
    PREEMPTED = "preempted"


@dataclass(slots=True, eq=False)
class FastDeployRequest:
    """A request as the engine knows it: ``out`` counts the output tokens that it has heard of.

    ``need`` is the prefill target, ``computed`` what was handed to the worker, both in tokens.
    """

    id: int
    prompt_tokens: int
    max_tokens: int
    need: int
    out: int = 0
    computed: int = 0
    slot: int | None = None
    status: RequestStatus = RequestStatus.WAITING

    @property
    def total(self) -> int:
        return self.prompt_tokens + self.out

    @property
    def decoding(self) -> bool:
        return self.computed >= self.need


class PlannedTask(NamedTuple):
    """A task of ``schedule``, not yet put; a decode's block table is taken at once."""

    kind: Literal["prefill", "decode", "preempt"]
    seq: FastDeployRequest
    start: int = 0
    end: int = 0
    blocks: int = 0


class ResourceManager:
    """Queues, slots and blocks, and what is done to them alike in all variants.

    ``waiting`` is a queue, ``running`` a list in admission order, ``pending`` holds preempted
    requests that the worker has not acknowledged, ``active`` the one unfinished chunked prefill of
    the ``ratio`` variants. ``why`` the last call left the head of ``waiting`` there, or a running
    request without its next chunk.
    """

    #: Whether an acknowledged request goes to the head of ``waiting``, not to its tail.
    requeue_at_head = True
    #: Blocks that a decode is given when it needs any.
    grows_by = 1

    def __init__(self, block_size: int, num_blocks: int, max_num_seqs: int) -> None:
        self.block_size = block_size
        self.pool: BlockPool = UnnumberedPool(num_blocks)
        self.waiting: deque[FastDeployRequest] = deque()
        self.running: list[FastDeployRequest] = []
        self.pending: dict[int, FastDeployRequest] = {}
        self.active: FastDeployRequest | None = None
        self.slots: list[FastDeployRequest | None] = [None] * max_num_seqs
        self.preempted: list[int] = []
        self.causes: list[PreemptionCause] = []
        self.why: WaitReason = "budget"
        self._tasks: list[PlannedTask] = []
        self._bsz = 0

    def add(self, prompt: Prompt) -> None:
        """Append a new request to ``waiting``."""
        self.waiting.append(
            FastDeployRequest(
                prompt.id, prompt.prompt_tokens, prompt.max_tokens, prompt.prompt_tokens
            )
        )

    def schedule(self) -> list[PlannedTask]:
        """Decide once; ``preempted`` lists the victims of this call afterwards.

        A slot overrun is swallowed as in the engine: what was changed stays changed, the tasks
        are lost and the request runs on without a slot.
        """
        self._tasks, self.preempted, self.causes, self.why = [], [], [], "budget"
        try:
            self._decide()
        except SlotOverrun:
            return []
        return self._tasks

    def held(self) -> Held | None:
        """The head of ``waiting``, and why the last call left it there."""
        return Held(self.waiting[0].id, self.why) if self.waiting else None

    @property
    def full(self) -> bool:
        """Whether nobody is taken from ``waiting`` before somebody ends."""
        raise NotImplementedError

    @property
    def admission_is_stable(self) -> bool:
        """Whether the head of ``waiting`` is judged as in the last call, until blocks change."""
        return False

    def growing(self, seq: FastDeployRequest, steps: int) -> Sequence[int]:
        """In which of the next ``steps`` calls, from 1, a request that decodes gets blocks."""
        raise NotImplementedError

    def decay(self, steps: int, growing: int) -> None:
        """So many calls had nothing but decodes; in ``growing`` of them there were tasks."""
        raise NotImplementedError

    def put(self, tasks: Iterable[PlannedTask]) -> TaskBatch:
        """Serialise tasks for the worker, with the token counts of this very moment."""
        used = [i for i, seq in enumerate(self.slots) if seq]
        if used:
            self._bsz = used[-1] + 1
        return TaskBatch([self._serialise(task) for task in tasks], self._bsz)

    def acknowledge(self, seq: FastDeployRequest) -> None:
        """The worker has let go of a preempted request: it waits again."""
        del self.pending[seq.id]
        if self.requeue_at_head:
            self.waiting.appendleft(seq)
        else:
            self.waiting.append(seq)

    def finish(self, seq: FastDeployRequest) -> bool:
        """End a request and free its slot and blocks; refused (False) while it is in ``waiting``.

        A refused one stays and is prefilled again, end-of-sequence token included.
        """
        if seq in self.waiting:
            return False
        if seq in self.running:
            self.running.remove(seq)
        self.pending.pop(seq.id, None)
        self.pool.release(seq.id)
        if seq.slot is not None:
            self.slots[seq.slot] = None
        return True

    def alive(self) -> list[FastDeployRequest]:
        """All requests that have not finished, in no particular order."""
        active = [self.active] if self.active else []
        return [*self.waiting, *self.running, *self.pending.values(), *active]

    def fingerprint(self) -> Hashable:
        """All state that decides the following calls."""
        queues = (self.waiting, self.running, self.pending.values(), [self.active])
        return tuple(
            tuple(
                (s.id, s.out, s.computed, s.need, s.slot, s.status, self.pool.held(s.id))
                for s in queue
                if s
            )
            for queue in queues
        )

    def _decide(self) -> None:
        raise NotImplementedError

    def _serialise(self, task: PlannedTask) -> WorkerTask:
        seq = task.seq
        blocks = task.blocks if task.kind == "decode" else self.pool.held(seq.id)
        return WorkerTask(
            task.kind,
            seq.id,
            seq.slot,
            task.start,
            task.end,
            seq.prompt_tokens,
            seq.total,
            blocks,
        )

    def _blocks_of_chunk(self, seq: FastDeployRequest, tokens: int) -> int:
        """Blocks that ``seq`` lacks to compute ``tokens`` more."""
        return blocks_for(seq.computed + tokens, self.block_size) - self.pool.held(seq.id)

    def _lack(self, blocks: int) -> WaitReason:
        """Why a chunk of ``blocks`` new blocks is not given, if it is for want of them."""
        return "reserved" if self.pool.free >= blocks else "blocks"

    def _grow(self, seq: FastDeployRequest, blocks: int) -> None:
        self.pool.take(seq.id, blocks)
        self._tasks.append(PlannedTask("decode", seq, blocks=self.pool.held(seq.id)))

    def _prefill(self, seq: FastDeployRequest, tokens: int, blocks: int) -> None:
        self.pool.take(seq.id, blocks)
        self._tasks.append(PlannedTask("prefill", seq, seq.computed, seq.computed + tokens))
        seq.computed += tokens

    def _preempt(self, seq: FastDeployRequest, by: FastDeployRequest) -> None:
        self.running.remove(seq)
        self.pool.release(seq.id)
        seq.status = RequestStatus.PREEMPTED
        seq.computed = 0
        self.pending[seq.id] = seq
        self.preempted.append(seq.id)
        self.causes.append(PreemptionCause(by.id))
        self._tasks.append(PlannedTask("preempt", seq))

    def _head(self) -> FastDeployRequest:
        """The head of ``waiting``, with its target set anew if it comes back from a preemption."""
        seq = self.waiting[0]
        if seq.status is RequestStatus.PREEMPTED:
            seq.need = seq.total
        return seq

    def _seat(self, seq: FastDeployRequest) -> None:
        """Give a new request the lowest free slot. Raises SlotOverrun."""
        seq.status = RequestStatus.RUNNING
        if seq.slot is None:
            if None not in self.slots:
                raise SlotOverrun(f"no slot is free for request {seq.id}")
            seq.slot = self.slots.index(None)
            self.slots[seq.slot] = seq


class TokenProcessor:
    """Reads the worker's messages slot by slot and changes the manager's state at once.

    With ``sentinel`` (PR #5796) only PREEMPTED acknowledges a preemption. Without, any negative
    token in the slot does, and so does a message too short to reach the slot (the engine takes
    several of the latter in set order; here: in order of preemption).
    """

    def __init__(self, manager: ResourceManager, *, sentinel: bool = True) -> None:
        self.manager = manager
        self.sentinel = sentinel

    def receive(self, message: Message) -> MessageEffects:
        """Deliver one message."""
        heard = MessageEffects()
        manager = self.manager
        if not self.sentinel:
            for pending in list(manager.pending.values()):
                if pending.slot is not None and pending.slot >= len(message):
                    self._acknowledge(pending, heard)
        for seq, token in zip(manager.slots.copy(), message, strict=False):
            if seq is None:
                continue
            if token < 0:
                acks = token == PREEMPTED or not self.sentinel
                if acks and seq.id in manager.pending:
                    self._acknowledge(seq, heard)
                continue
            seq.out += 1
            if seq.status is RequestStatus.RUNNING:
                seq.status = RequestStatus.RUNNING_DECODE
            heard.delivered.append(seq.id)
            if token == EOS and manager.finish(seq):
                heard.finished.append(seq.id)
        return heard

    def _acknowledge(self, seq: FastDeployRequest, heard: MessageEffects) -> None:
        self.manager.acknowledge(seq)
        heard.acked.append(seq.id)
