"""State of SGLang's scheduler between two iterations of its loop."""

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
from simkv.core.virtual_token_counters import VirtualTokenCounters
from simkv.schedulers.sglang.config import SglangConfig
from simkv.schedulers.sglang.lora import SglangLoras
from simkv.schedulers.sglang.memory import Req, SglangMemory
from simkv.schedulers.sglang.new_token_ratio import NewTokenRatio
from simkv.schedulers.sglang.versions import SglangRules

#: Error messages of rejected requests (``_abort_on_queued_limit``).
QUEUE_FULL = Refusal("max_queued_requests", "The request queue is full.")
OUTRANKED = Refusal(QUEUE_FULL.knob, "The request is aborted by a higher priority request.")


@dataclass(slots=True, eq=False)
class ScheduleBatch:
    """The engine's batch object.

    - ``rows``: requests that prefill, then requests that decode.
    - ``prefills``: number of requests that prefill.
    - ``full``: the engine's ``batch_is_full``. If ``full`` is set on the running batch, no request
      is admitted.
    - ``extend_tokens``: number of prefill tokens.
    - ``chunked``: request whose prompt is still incomplete after this batch.
    - ``prefill_only``: whether every request has an output limit of 0.
    """

    # The running batch is also a ``ScheduleBatch`` and may have begun as a prefill.

    rows: list[Req] = field(default_factory=list)
    kind: BatchKind = "decode"
    full: bool = False
    prefills: int = 0
    extend_tokens: int = 0
    chunked: Req | None = None
    prefill_only: bool = False

    def keep(self, staying: list[Req]) -> bool:
        """Remove all requests that are not in ``staying``. Return whether any were removed.

        A removal clears ``full``.
        """
        left = len(staying) < len(self.rows)
        if left:
            self.rows = staying
            self.full = False
        return left


class LaunchedBatch(NamedTuple):
    """A launched batch and the requests that will emit a token."""

    # A request whose prompt stays incomplete emits none.

    batch: Batch
    prefills: list[Req]
    decodes: list[Req]


class LoopState:
    """State of one engine: queue, running batch, batches in flight and memory.

    - ``last``: batch that was launched last. It can be the batch ``running``.
    - ``chunked``: request with an incomplete prompt. It is in neither ``running`` nor ``waiting``.
    - ``admitted``: requests that count towards ``max_running_requests``.
    - ``why``: reason why the head of the queue was not admitted.
    - ``rejections``: requests rejected since the last batch because the queue was full.
    - ``now``: time in seconds since the start.
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
        #: Service of each client, with the policy ``vtc``.
        self.counters: VirtualTokenCounters | None = None
        if config.schedule_policy == "vtc":
            self.counters = VirtualTokenCounters(self._emitted)
        self.now = 0.0

    @property
    def idle(self) -> bool:
        """Whether no request is in the engine."""
        return not (self.waiting or self.running.rows or self.chunked or self.flights)

    def queue(self, r: Req) -> None:
        """Append ``r`` to the waiting queue.

        If the queue is full, the least urgent request is rejected. Without priorities, ``r`` is
        rejected.
        """
        most = self.config.max_queued_requests
        if most is not None and len(self.waiting) >= most and self._turn_away_for(r) is r:
            return
        self.entries += 1
        r.stamp, r.queued_at, r.entry = self.processed_tokens, self.now, self.entries
        self.waiting.append(r)
        if self.counters:
            self.counters.enter(r.client)

    def _emitted(self, request_id: int) -> int:
        return self.live[request_id].out

    def forget(self, r: Req, *, waiting: bool = False) -> None:
        """Remove ``r`` from the engine.

        ``waiting`` is true if ``r`` is in the queue.
        """
        if self.counters:
            self.counters.end(r.id, r.client)
            if waiting:
                self.counters.leave(r.client)
        del self.live[r.id]

    def _turn_away_for(self, r: Req) -> Req:
        """Reject and return the least urgent request among ``r`` and the queue.

        Among equally urgent requests, the newest is rejected. Without priorities, ``r`` is
        rejected.
        """
        last, why = r, QUEUE_FULL
        if self.config.enable_priority_scheduling:
            worst = max(self.waiting, key=lambda x: (self.urgency(x), x.entry))
            if self.urgency(r) < self.urgency(worst):
                last, why = worst, OUTRANKED
                self.waiting.remove(worst)
        last.pending = 0  # tokens still in flight are discarded
        self.forget(last)
        self.rejections[last.id] = why
        return last

    def urgency(self, r: Req) -> int:
        """Return the sort key of a request's priority, most urgent request first."""
        return r.priority if self.config.schedule_low_priority_values_first else -r.priority

    def admit(self, rows: list[Req]) -> None:
        """Add the requests ``rows`` to ``admitted``."""
        if self.counters:
            for r in rows:
                if r.id not in self.admitted:
                    self.counters.leave(r.client)
                    self.counters.charge(r.id, r.client, r.prompt_tokens)
        self.admitted.update((r.id, r) for r in rows)

    def release(self, r: Req) -> None:
        """Free the memory of ``r`` and remove ``r`` from ``admitted``."""
        self.memory.release(r)
        del self.admitted[r.id]

    def end(self, r: Req) -> None:
        """End ``r`` and free all its resources."""
        r.finished = True
        self.release(r)
        self.forget(r)
