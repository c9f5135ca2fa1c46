"""FastDeploy's worker: each slot continues to decode until a new task arrives for it.

The worker is one of the actors in ``scheduler``; it has no queues and no clock. Source:
PaddlePaddle/FastDeploy@74d0f1c01 and @4fd877ed4 (``insert_tasks_v1``, ``update_inputs_v1``,
``recover_decode_task``, ``save_with_output_msg``).
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import astuple, dataclass
from typing import Literal, NamedTuple

from simkv.core.actor_protocol import IsLastToken, Message, WorkerCrash

#: Values of a slot in a message. A number k > 0 means the k-th output token of the request.
EOS = 0
NO_TOKEN = -1
PREEMPTED = -9


class WorkerTask(NamedTuple):
    """A task that the engine sends to the worker for one request.

    - ``length``: number of prompt and output tokens.
    - ``blocks``: number of blocks in the block table.
    - ``start``: index of the first token to prefill.
    - ``end``: index after the last token to prefill.
    """

    kind: Literal["prefill", "decode", "preempt"]
    id: int
    slot: int | None
    start: int
    end: int
    prompt_tokens: int
    length: int
    blocks: int


class TaskBatch(NamedTuple):
    """The tasks of one ``schedule`` call. ``bsz`` is the highest index of a used slot, plus one."""

    tasks: list[WorkerTask]
    bsz: int


class SlotWork(NamedTuple):
    """Work of one slot in a step.

    - ``tokens``: number of tokens to compute.
    - ``context``: number of tokens whose KV is already cached.
    - ``emits``: whether the step emits an output token.
    """

    id: int
    tokens: int
    context: int
    emits: bool


@dataclass(slots=True)
class Slot:
    """A slot of the worker. ``length`` is the number of prompt and output tokens of its request."""

    id: int
    prompt_tokens: int
    length: int
    blocks: int
    start: int
    end: int
    state: Literal["prefill", "chunk stopped", "decode", "idle"] = "prefill"


class FastDeployWorker:
    """Slots of the worker, their block tables, and flags for preempted slots.

    - ``sentinel``: whether a preempted slot sends PREEMPTED in the next message (PR #5796).
      Otherwise it sends NO_TOKEN.
    - ``decode_clears_flag``: whether a later decode task clears the flag of the slot. The
      preemption is then never acknowledged.
    - ``idle_sends``: whether an idle worker sends a message to acknowledge a preemption (PR #7633).
    """

    def __init__(
        self,
        block_size: int,
        *,
        sentinel: bool = True,
        decode_clears_flag: bool = True,
        idle_sends: bool = True,
    ) -> None:
        self.block_size = block_size
        self.sentinel = sentinel
        self.decode_clears_flag = decode_clears_flag
        self.idle_sends = idle_sends
        self.bsz = 0
        self.slots: dict[int, Slot] = {}
        self.flags: set[int] = set()
        self._acknowledge = False
        self._prefills: list[int] = []

    def take(self, parcel: TaskBatch) -> None:
        """Apply the tasks of one call. Raises WorkerCrash if a request has no slot."""
        self.bsz = parcel.bsz
        for task in parcel.tasks:
            i = task.slot
            if i is None:  # the engine's worker would use None as an array index
                raise WorkerCrash(f"request {task.id} has no slot")
            if task.kind == "preempt":
                if i in self.slots:
                    self.slots[i].state = "idle"
                self.flags.add(i)
                self._acknowledge = True
            elif task.kind == "prefill":
                self.slots[i] = Slot(
                    task.id, task.prompt_tokens, task.length, task.blocks, task.start, task.end
                )
                self._prefills.append(i)
                self.flags.discard(i)
            else:
                if i in self.slots:
                    self.slots[i].blocks = task.blocks
                if self.decode_clears_flag:
                    self.flags.discard(i)

    def work(self) -> list[SlotWork]:
        """Return the work of the next step: prefills in task order, then decodes in slot order."""
        prefills = [s for s in map(self.slots.__getitem__, self._prefills) if s.state == "prefill"]
        decodes = [s for _, s in sorted(self.slots.items()) if self._decodes(s)]
        return [SlotWork(s.id, s.end - s.start, s.start, s.end >= s.length) for s in prefills] + [
            SlotWork(s.id, 1, s.length - 1, True) for s in decodes
        ]

    def stalled(self) -> list[int]:
        """Return the ids of the decoding requests that lack a block, in slot order."""
        decoding = [s for _, s in sorted(self.slots.items()) if s.state == "decode"]
        return [s.id for s in decoding if not self._decodes(s)]

    def step(self, ends: IsLastToken) -> Message | None:
        """Run one step and return the token of each slot, or None if there is no work.

        The function ``ends`` returns whether a request ends with a given token.
        """
        # The message has an entry for each slot below ``bsz``. ``ends`` also holds for the token at
        # the limit ``max_tokens``.
        active = [i for i, s in self.slots.items() if s.state == "prefill" or self._decodes(s)]
        silent = not active and not (self._acknowledge and self.idle_sends)
        self._acknowledge = False
        self._prefills.clear()
        if silent:
            return None
        tokens = {i: self._emit(self.slots[i], ends) for i in active}
        if self.sentinel:
            tokens.update(dict.fromkeys(self.flags, PREEMPTED))
        self.flags.clear()
        return [tokens.get(i, NO_TOKEN) for i in range(self.bsz)]

    def fingerprint(self) -> Hashable:
        """Return the state that determines the following steps."""
        slots = tuple(sorted((i, *astuple(s)) for i, s in self.slots.items() if s.state != "idle"))
        return slots, tuple(sorted(self.flags)), self.bsz, self._acknowledge

    def _decodes(self, slot: Slot) -> bool:
        # The step writes the KV of the last emitted token; a slot without a block for it waits.
        return slot.state == "decode" and slot.blocks * self.block_size >= slot.length

    def _emit(self, slot: Slot, ends: IsLastToken) -> int:
        if slot.state == "prefill" and slot.end < slot.length:
            slot.state = "chunk stopped"
            return NO_TOKEN
        k = slot.length - slot.prompt_tokens + 1
        slot.length += 1
        slot.state = "idle" if ends(slot.id, k) else "decode"
        return k if slot.state == "decode" else EOS
