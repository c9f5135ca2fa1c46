"""What SGLang's scheduler holds from one turn of its loop to the next."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from simkv.core.scheduler_protocol import (
    Batch,
    BatchKind,
    Refusal,
    WaitReason,
)
from simkv.schedulers.sglang.config import SglangConfig
from simkv.schedulers.sglang.lora import SglangLoras
from simkv.schedulers.sglang.memory import Req, SglangMemory
from simkv.schedulers.sglang.new_token_ratio import NewTokenRatio
from simkv.schedulers.sglang.versions import SglangRules

#: How a request is turned away (``_abort_on_queued_limit``).
QUEUE_FULL = Refusal("max_queued_requests", "The request queue is full.")
OUTRANKED = Refusal(QUEUE_FULL.knob, "The request is aborted by a higher priority request.")


@dataclass(slots=True, eq=False)
class ScheduleBatch:
    """The engine's batch object; the running batch is one, and may have begun as a prefill.

    ``full`` ("batch_is_full") on the running batch keeps the queue from being looked at.
    A batch that was built to prefill has ``prefills`` such rows before any others, and
    ``extend_tokens`` to compute; ``chunked`` is the one whose prompt that does not finish. One in
    which nobody may emit anything was built as ``prefill_only``, and never decodes.
    """

    rows: list[Req] = field(default_factory=list)
    kind: BatchKind = "decode"
    full: bool = False
    prefills: int = 0
    extend_tokens: int = 0
    chunked: Req | None = None
    prefill_only: bool = False

    def keep(self, staying: list[Req]) -> bool:
        """Go on with ``staying`` alone; whether somebody left, who makes room."""
        left = len(staying) < len(self.rows)
        if left:
            self.rows = staying
            self.full = False
        return left


class LaunchedBatch(NamedTuple):
    """A launched batch and the rows that will emit; a prompt's middle chunk is not among them."""

    batch: Batch
    prefills: list[Req]
    decodes: list[Req]


class LoopState:
    """One engine: its queue, its running batch, what is under way, and the memory for all that.

    ``last`` is the batch that was launched before (it may be ``running`` itself), ``chunked`` the
    one request whose prompt is partly computed: it is neither in ``running`` nor in ``waiting``.
    All of ``admitted`` hold a row of ``max_running_requests``. ``why`` the head of the queue was
    passed over when it was last looked at. ``turned_away`` were those for whom the queue was full.
    ``loras`` say who may run beside whom, if requests can ask for adapters. It is ``now`` so many
    seconds from the start.
    """

    def __init__(self, config: SglangConfig, rules: SglangRules, memory: SglangMemory) -> None:
        self.config = config
        self.rules = rules
        self.memory = memory
        self.ratio = NewTokenRatio(config)
        self.waiting: list[Req] = []
        self.running = ScheduleBatch()
        self.last: ScheduleBatch | None = None
        self.chunked: Req | None = None
        self.processed_tokens = 0
        self.live: dict[int, Req] = {}
        self.admitted: dict[int, Req] = {}
        self.flights: deque[LaunchedBatch] = deque()
        self.why: WaitReason = "rule"
        self.entries = 0
        self.rejections: dict[int, Refusal] = {}
        self.loras: SglangLoras | None = None
        if config.enable_lora:
            self.loras = SglangLoras(config.max_loras_per_batch, config.lora_drain_wait_threshold)
        self.now = 0.0

    @property
    def idle(self) -> bool:
        """Whether nobody is here."""
        return not (self.waiting or self.running.rows or self.chunked or self.flights)

    def queue(self, r: Req) -> None:
        """Put ``r``, which comes or was retracted, behind all who wait.

        If they are too many one is turned away: ``r``, or by priority who is less urgent than it.
        """
        most = self.config.max_queued_requests
        if most is not None and len(self.waiting) >= most and self._turn_away_for(r) is r:
            return
        self.entries += 1
        r.stamp, r.queued_at, r.entry = self.processed_tokens, self.now, self.entries
        self.waiting.append(r)

    def _turn_away_for(self, r: Req) -> Req:
        """Turn away ``r`` or the least urgent of the queue (the last that came); who it was."""
        last, why = r, QUEUE_FULL
        if self.config.enable_priority_scheduling:
            worst = max(self.waiting, key=lambda x: (self.urgency(x), x.entry))
            if self.urgency(r) < self.urgency(worst):
                last, why = worst, OUTRANKED
                self.waiting.remove(worst)
        last.pending = 0  # what it still computes is for nobody
        del self.live[last.id]
        self.rejections[last.id] = why
        return last

    def urgency(self, r: Req) -> int:
        """Less is more urgent."""
        return r.priority if self.config.schedule_low_priority_values_first else -r.priority

    def admit(self, rows: list[Req]) -> None:
        """Each of ``rows`` holds a row from now on."""
        self.admitted.update((r.id, r) for r in rows)

    def release(self, r: Req) -> None:
        """Take back the row and the memory of ``r``."""
        self.memory.release(r)
        del self.admitted[r.id]

    def end(self, r: Req) -> None:
        """``r`` has ended, and all that it had is taken back."""
        r.finished = True
        self.release(r)
        del self.live[r.id]
