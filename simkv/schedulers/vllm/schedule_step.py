"""What one ``schedule`` call of vLLM gives, and how it is written down."""

from __future__ import annotations

from collections.abc import Sized

from simkv.core.scheduler_protocol import Batch, WaitReason
from simkv.schedulers.vllm.request_state import RequestState
from simkv.schedulers.vllm.speculative_decoding import SpeculativeDecoding


class ScheduleStep:
    """One ``schedule`` call: its constants, the ``budget`` left, and what it has given so far.

    ``threshold`` caps the tokens per request (0: no cap), ``hold`` keeps prefills out. ``prefill``
    notes whether any got in. ``blocks`` are those that running requests got in this step. ``why``
    the head of the queue was passed over goes into the ``batch``. When waiting requests are looked
    at, ``ran`` says whether any running one got tokens, ``chunks`` whether of a prompt.

    Where a drafter needs ``slots`` of its own for each request, these count against ``inputs``,
    which limit a step beside its tokens.
    """

    def __init__(self, tokens: int, threshold: int, hold: bool, inputs: int, slots: int) -> None:
        self._left, self._inputs, self._slots = tokens, inputs, slots
        self.budget = 0
        self.restore(0, 0)
        self.threshold = threshold
        self.hold = hold
        self.prefill = self.ran = self.chunks = False
        self.tokens: dict[RequestState, int] = {}
        self.blocks: dict[RequestState, int] = {}
        self.why: WaitReason | None = None
        self.batch = Batch()

    def spend(self, tokens: int, requests: int = 1) -> None:
        """``requests`` get so many tokens in all."""
        self.restore(-tokens, -requests)

    def restore(self, tokens: int, requests: int = 1) -> None:
        """``requests`` do not get the so many tokens that they had got."""
        self._left += tokens
        self.budget = self._left
        if self._slots:
            self._inputs += tokens + requests * self._slots
            self.budget = max(min(self._left, self._inputs - self._slots), 0)

    def begin_admission(self) -> None:
        """Running requests have their tokens, waiting ones come next."""
        self.ran, self.chunks = bool(self.tokens), self.prefill

    def skip_request(self, why: WaitReason) -> None:
        """A waiting request is not admitted; the first one is the head of the queue."""
        self.why = self.why or why

    def dispatch(self, group: Sized, drafts: SpeculativeDecoding | None) -> None:
        """Count what was given as computed, and write the rows of all but the ``group`` down."""
        batch, decodes = self.batch, len(group)
        if drafts and self.tokens:
            drafts.begin(batch)
        for r, n in self.tokens.items():
            batch.scheduled.append((r.id, n))
            batch.context.append(r.computed)
            drafted = drafts.verified(r, n, batch) if drafts else 0
            emitted = n - drafted == 1 and r.computed >= r.prompt.prompt_tokens
            r.computed += n
            r.in_flight += n
            r.chunk = r.computed < r.length + r.placeholders
            decodes += emitted and not r.chunk  # after a preemption older ones are prefill
            if not r.chunk:
                r.placeholders += 1 + drafted
                batch.emits.append(r.id)
            if drafts:
                drafts.propose(r)
        if batch:
            batch.kind = "mixed" if decodes else "prefill"
            if decodes == len(self.tokens) + len(group):
                batch.kind = "decode"
