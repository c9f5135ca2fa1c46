"""State shared by FastDeploy's engine and token processor, and the operations on it.

This module has the queues, slots and block tables of ResourceManagerV1, and the reader of the
worker's messages. The scheduling decision is in ``fixed_reserve`` and ``ratio_reserve``. Source:
PaddlePaddle/FastDeploy@74d0f1c01 and its parent commit.
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
    """Raised if no slot is free for an admitted request.

    FastDeploy logs the error and continues.
    """


class RequestStatus(Enum):
    """State of a request. RUNNING_DECODE begins with the first token after a prefill."""

    WAITING = "waiting"
    RUNNING = "running"
    RUNNING_DECODE = "running decode"
    PREEMPTED = "preempted"


@dataclass(slots=True, eq=False)
class FastDeployRequest:
    """A request in the engine.

    - ``out``: number of output tokens that the engine has received.
    - ``need``: number of tokens to prefill.
    - ``computed``: number of tokens that the engine has sent to the worker.
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
    """A task for the worker.

    Decode tasks set ``blocks``, the length of the block table.
    """

    kind: Literal["prefill", "decode", "preempt"]
    seq: FastDeployRequest
    start: int = 0
    end: int = 0
    blocks: int = 0


class ResourceManager:
    """Queues, slots and blocks of the engine.

    - ``running``: requests in admission order.
    - ``pending``: preempted requests that the worker has not acknowledged.
    - ``active``: the request whose chunked prefill is unfinished (``ratio`` variants only).
    - ``why``: reason why the last call did not schedule all requests.
    """

    #: Whether a preempted request returns to the head of ``waiting`` (otherwise to its tail).
    requeue_at_head = True
    #: Number of blocks allocated at a time to a decoding request.
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
        """Make the scheduling decisions of one call and return the tasks for the worker.

        ``preempted`` then lists the requests that the call preempted.
        """
        # A slot overrun is ignored, as in the engine: the state changes remain, the tasks of the
        # call are lost, and the request runs without a slot.
        self._tasks, self.preempted, self.causes, self.why = [], [], [], "budget"
        try:
            self._decide()
        except SlotOverrun:
            return []
        return self._tasks

    def held(self) -> Held | None:
        """Return the first waiting request and the reason why it waits.

        Returns None if no request waits.
        """
        return Held(self.waiting[0].id, self.why) if self.waiting else None

    @property
    def full(self) -> bool:
        """Whether the maximum number of requests is running. No request can be admitted then."""
        raise NotImplementedError

    @property
    def admission_is_stable(self) -> bool:
        """Whether only a change in the number of free blocks can change the admission decision."""
        return False

    def growing(self, seq: FastDeployRequest, steps: int) -> Sequence[int]:
        """Return the numbers of the calls in which a decoding request gets blocks.

        The next call has the number 1. Only the next ``steps`` calls are considered.
        """
        raise NotImplementedError

    def decay(self, steps: int, growing: int) -> None:
        """Reduce the block reserve as ``steps`` decode-only calls do.

        ``growing`` is the number of calls that send tasks.
        """
        raise NotImplementedError

    def put(self, tasks: Iterable[PlannedTask]) -> TaskBatch:
        """Convert planned tasks to tasks for the worker, with the current token counts."""
        used = [i for i, seq in enumerate(self.slots) if seq]
        if used:
            self._bsz = used[-1] + 1
        return TaskBatch([self._serialise(task) for task in tasks], self._bsz)

    def acknowledge(self, seq: FastDeployRequest) -> None:
        """Put a preempted request back into the queue after the worker has released it."""
        del self.pending[seq.id]
        if self.requeue_at_head:
            self.waiting.appendleft(seq)
        else:
            self.waiting.append(seq)

    def finish(self, seq: FastDeployRequest) -> bool:
        """End a request and free its slot and blocks.

        Returns False and does nothing if the request is waiting.
        """
        # Because of an engine bug, a waiting request does not end: it is prefilled again, including
        # its end-of-sequence token.
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
        """Return all unfinished requests, in no particular order."""
        active = [self.active] if self.active else []
        return [*self.waiting, *self.running, *self.pending.values(), *active]

    def fingerprint(self) -> Hashable:
        """Return the state that determines the following calls."""
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
        """Return the number of blocks that ``seq`` lacks to compute ``tokens`` more tokens."""
        return blocks_for(seq.computed + tokens, self.block_size) - self.pool.held(seq.id)

    def _lack(self, blocks: int) -> WaitReason:
        """Return why a chunk was not scheduled.

        Either too few blocks are free, or the free blocks are reserved.
        """
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
        """Return the head of ``waiting``; after a preemption, reset its prefill target."""
        seq = self.waiting[0]
        if seq.status is RequestStatus.PREEMPTED:
            seq.need = seq.total
        return seq

    def _seat(self, seq: FastDeployRequest) -> None:
        """Assign the lowest free slot to a new request. Raises SlotOverrun."""
        seq.status = RequestStatus.RUNNING
        if seq.slot is None:
            if None not in self.slots:
                raise SlotOverrun(f"no slot is free for request {seq.id}")
            seq.slot = self.slots.index(None)
            self.slots[seq.slot] = seq


class TokenProcessor:
    """Processor of the worker's messages.

    With ``sentinel`` (PR #5796), only the token PREEMPTED acknowledges a preemption. Without
    ``sentinel``, any negative token acknowledges a preemption.
    """

    # Without ``sentinel``, a message that is too short to contain the slot also acknowledges the
    # preemption. If a message is too short for several slots, the engine acknowledges them in the
    # order of a Python set; this class uses the order of preemption.

    def __init__(self, manager: ResourceManager, *, sentinel: bool = True) -> None:
        self.manager = manager
        self.sentinel = sentinel

    def receive(self, message: Message) -> MessageEffects:
        """Process one message and return its effects."""
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
