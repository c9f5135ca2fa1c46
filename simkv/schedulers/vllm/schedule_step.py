# mypyc: compile
"""State of one ``schedule`` call of vLLM while it builds a batch."""

from __future__ import annotations

from collections.abc import Sized

from simkv.core.scheduler_protocol import Batch, WaitReason
from simkv.schedulers.vllm.request_state import RequestState
from simkv.schedulers.vllm.speculative_decoding import SpeculativeDecoding


class ScheduleStep:
    """State of one ``schedule`` call.

    - ``budget``: tokens that can still be scheduled.
    - ``tokens``: tokens scheduled so far, by request.
    - ``threshold``: maximum number of tokens per request; 0 means no limit.
    - ``hold``: whether prefills are excluded.
    - ``prefill``: whether a prefill was scheduled.
    - ``blocks``: number of new blocks, by running request.
    - ``why``: reason why the head of the queue was skipped, or None.
    - ``ran``: whether tokens of running requests were scheduled. ``chunks``: whether any of these
      were prompt tokens.
    - ``inputs``: second token limit. Each request also uses ``slots`` of its tokens for the
      drafter.
    """

    # ``ran`` and ``chunks`` are set when admission begins.

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
        """Subtract scheduled tokens from the budget.

        ``requests`` is the number of requests that get the tokens.
        """
        self.restore(-tokens, -requests)

    def restore(self, tokens: int, requests: int = 1) -> None:
        """Undo ``spend`` for tokens that are no longer scheduled."""
        self._left += tokens
        self.budget = self._left
        if self._slots:
            self._inputs += tokens + requests * self._slots
            self.budget = max(min(self._left, self._inputs - self._slots), 0)

    def begin_admission(self) -> None:
        """Begin the admission phase, after the running requests were scheduled."""
        self.ran, self.chunks = bool(self.tokens), self.prefill

    def skip_request(self, why: WaitReason) -> None:
        """Record why a waiting request is not admitted. Only the first recorded reason is kept."""
        self.why = self.why or why

    def dispatch(self, group: Sized, drafts: SpeculativeDecoding | None) -> None:
        """Count the scheduled tokens as computed and complete the batch."""
        # The requests in ``group`` have no rows in the batch.
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
            decodes += emitted and not r.chunk  # recomputed output tokens count as prefill
            if not r.chunk:
                r.placeholders += 1 + drafted
                batch.emits.append(r.id)
            if drafts:
                drafts.propose(r)
        if batch:
            batch.kind = "mixed" if decodes else "prefill"
            if decodes == len(self.tokens) + len(group):
                batch.kind = "decode"
