"""What one ``schedule`` call of vLLM gives, and how it is written down."""

from __future__ import annotations

from collections.abc import Sized

from simkv.core.scheduler import Batch, Row, Why
from simkv.schedulers.vllm.requests import RequestState


class Step:
    """One ``schedule`` call: its constants, the ``budget`` left, and what it has given so far.

    ``threshold`` caps the tokens per request (0: no cap), ``hold`` keeps prefills out. ``prefill``
    notes whether any got in. ``blocks`` are those that running requests got in this step. ``why``
    the head of the queue was passed over goes into the ``batch``.
    """

    def __init__(self, budget: int, threshold: int, hold: bool) -> None:
        self.budget = budget
        self.threshold = threshold
        self.hold = hold
        self.prefill = False
        self.tokens: dict[RequestState, int] = {}
        self.blocks: dict[RequestState, int] = {}
        self.why: Why | None = None
        self.batch = Batch()

    def pass_over(self, why: Why) -> None:
        """A waiting request is not admitted; the first one is the head of the queue."""
        self.why = self.why or why

    def dispatch(self, group: Sized) -> dict[int, Row]:
        """Count what was given as computed, and write the rows of all but the ``group`` down.

        Returns them by request.
        """
        batch, decodes = self.batch, len(group)
        rows: dict[int, Row] = {}
        for r, n in self.tokens.items():
            rows[r.id] = Row(r.id, n, r.computed)
            batch.scheduled.append((r.id, n))
            batch.context.append(r.computed)
            emitted = n == 1 and r.computed >= r.prompt.prompt_tokens
            r.computed += n
            r.in_flight += n
            r.chunk = r.computed < r.length + r.placeholders
            decodes += emitted and not r.chunk  # after a preemption older ones are prefill
            if not r.chunk:
                r.placeholders += 1
                batch.emits.append(r.id)
        if batch:
            batch.kind = "mixed" if decodes else "prefill"
            if decodes == len(self.tokens) + len(group):
                batch.kind = "decode"
        return rows
