"""Speculative decoding: tokens that a drafter proposes and the model verifies in one step.

A request that decodes computes its next token and its drafts; of these the model accepts the first
so many, and the rest is taken back. A synchronous scheduler knows the drafts when it decides; the
asynchronous one keeps places for ``num_speculative_tokens`` of them, and learns a step later how
many tokens came.

The rules are those of ``Scheduler`` and ``AsyncScheduler`` (vllm/v1/core/sched), 0.12.0 to 0.33.0.
"""

from __future__ import annotations

from mypy_extensions import mypyc_attr

from simkv.core.scheduler_protocol import Batch, DraftedTokens
from simkv.schedulers.vllm.config import VllmConfig
from simkv.schedulers.vllm.release_rules import VllmRules
from simkv.schedulers.vllm.request_state import RequestState


@mypyc_attr(allow_interpreted_subclasses=True, serializable=True)
class SpeculativeDecoding:
    """How many tokens a request with drafts computes, and what comes back of them.

    ``most`` drafts are proposed for a request at a time. ``slots`` of a step's tokens are kept for
    the drafter, for each request. ``late``: what was accepted is not cached until the next step of
    the request.
    """

    def __init__(self, config: VllmConfig, rules: VllmRules) -> None:
        self.most = config.num_speculative_tokens
        self.slots = config.draft_slots if rules.slots_by_request else 0
        self.late = config.depth == 1 and not rules.caches_accepted
        self._passes = 0 if config.speculative_method == "ngram" else self.most
        self._rules = rules
        self._longest = config.max_model_len
        # A drafter in lock-step with the model proposes for unfinished prompts too, n-grams never:
        # theirs are none, and take the place of what was there.
        ngrams, alone = config.speculative_method == "ngram", config.depth == 1
        self._for_chunks = rules.drafts_for_chunks and alone and not ngrams
        self._stay = not (alone and ngrams)

    def begin(self, batch: Batch) -> None:
        """A batch is written down."""
        batch.drafted = DraftedTokens(self._passes)

    def wanted(self, r: RequestState) -> int:
        """Tokens that a running request has left to compute, as far as they have positions."""
        prompt = r.prompt
        sure = r.computed + 2 - r.placeholders  # its length if every draft under way is rejected
        if r.placeholders > 0 and sure >= prompt.prompt_tokens + prompt.max_tokens:
            return 0
        wanted = r.length + r.placeholders + r.drafts - r.computed
        return min(wanted, self._longest - r.computed - 1)

    def count_padded_tokens(self, start: int, ran: bool, chunks: bool, budget: int) -> int:
        """Tokens for a waiting request that has one to compute behind ``start``: as many as those
        have that ``ran`` in this step, but not beside ``chunks``. 0: it is not let in.
        """
        rules = self._rules
        alike = rules.pads_drafts and not chunks and (ran or (rules.pads_hits and start > 0))
        n = 1 + self.most
        if not alike:
            return 1
        if start + n + rules.pads_with_room > self._longest:
            return 1 if rules.pads_with_room else 0
        return n if n <= budget else 0

    def verified(self, r: RequestState, n: int, batch: Batch) -> int:
        """Of the ``n`` tokens that ``r`` gets, those that are drafts; notes them in the batch."""
        # vLLM counts all of them, also where the end of a block cuts the step short.
        drafted = self.most if r.count_padded_tokens else n + r.computed - r.length - r.placeholders
        r.count_padded_tokens = False
        if drafted <= 0:
            return 0
        assert batch.drafted is not None
        batch.drafted.tokens[r.id] = drafted
        if r.fresh or r.discards_drafts:
            batch.drafted.padding.add(r.id)
        return drafted

    def propose(self, r: RequestState) -> None:
        """The drafts of ``r`` for its next step, now that it has its tokens in this one."""
        fresh, r.fresh = r.fresh, False
        if not r.chunk or self._for_chunks:
            r.drafts, r.discards_drafts = self.most, r.chunk
        elif fresh and r.drafts and self._stay:
            r.discards_drafts = True  # from before it was preempted
        else:
            r.drafts = 0

    def preempted(self, r: RequestState, had: int) -> None:
        """``r`` has lost its blocks, and the ``had`` tokens that this step had given it."""
        if had or not self._rules.keeps_drafts:
            r.drafts = 0

    def deliver(self, r: RequestState, batch: Batch, *, stale: bool) -> int:
        """The tokens that ``r`` got in a batch that has run; takes back what was rejected."""
        drafted = batch.drafted
        if drafted is None or r.id not in drafted.tokens:
            return 1
        verified, accepted = drafted.tokens[r.id], drafted.accepted.get(r.id, 0)
        if not stale:
            r.placeholders -= verified
            r.computed -= verified - accepted
        tokens = min(1 + accepted, r.stop_length - r.length)
        drafted.accepted[r.id] = tokens - 1
        return tokens
