# mypyc: compile
"""Speculative decoding: a drafter proposes tokens and the model verifies them in one step.

A step of a decoding request computes its next token and its draft tokens ("drafts"). The model
accepts a prefix of the drafts; the scheduler removes the rest. A synchronous scheduler knows the
drafts when it schedules. The asynchronous scheduler reserves ``num_speculative_tokens``
placeholders and learns the number of accepted tokens one step later.

Source: ``Scheduler`` and ``AsyncScheduler`` (vllm/v1/core/sched), since 0.12.0.
"""

from __future__ import annotations

from mypy_extensions import mypyc_attr

from simkv.core.scheduler_protocol import Batch, DraftedTokens
from simkv.schedulers.vllm.config import VllmConfig
from simkv.schedulers.vllm.release_rules import VllmRules
from simkv.schedulers.vllm.request_state import RequestState


@mypyc_attr(allow_interpreted_subclasses=True, serializable=True)
class SpeculativeDecoding:
    """Numbers of draft tokens (drafts) of each request, and results of their verification.

    - ``most``: number of drafts per request and step.
    - ``slots``: number of tokens per request that a step reserves for the drafter.
    - ``late``: whether accepted tokens are cached only in the next step of the request.
    """

    def __init__(self, config: VllmConfig, rules: VllmRules) -> None:
        self.most = config.num_speculative_tokens
        self.slots = config.draft_slots if rules.reserves_slots_by_request else 0
        self.late = config.depth == 1 and not rules.caches_accepted_at_once
        self._passes = 0 if config.speculative_method == "ngram" else self.most
        self._rules = rules
        self._longest = config.max_model_len
        # A synchronous draft model also proposes drafts for unfinished prompts. The n-gram drafter
        # proposes none for them and clears earlier drafts.
        ngrams, alone = config.speculative_method == "ngram", config.depth == 1
        self._for_chunks = rules.drafts_for_chunks and alone and not ngrams
        self._stay = not (alone and ngrams)

    def begin(self, batch: Batch) -> None:
        """Add an empty record of drafts to the batch."""
        batch.drafted = DraftedTokens(self._passes)

    def wanted(self, r: RequestState) -> int:
        """Return the number of tokens that a running request has left to compute."""
        # Tokens beyond ``max_model_len`` are not counted.
        prompt = r.prompt
        sure = r.computed + 2 - r.placeholders  # total length if all drafts in flight are rejected
        if r.placeholders > 0 and sure >= prompt.prompt_tokens + prompt.max_tokens:
            return 0
        wanted = r.length + r.placeholders + r.drafts - r.computed
        return min(wanted, self._longest - r.computed - 1)

    def count_padded_tokens(self, start: int, ran: bool, chunks: bool, budget: int) -> int:
        """Return the number of tokens to schedule for a waiting request with one uncomputed token.

        Some releases reserve draft slots at admission. In these releases the number includes them.
        The result is 0 if the request cannot be admitted.
        """
        # Draft slots are included only if the step contains no ``chunks`` of prompts, and if
        # running requests were scheduled in it (``ran``) or, with the rule ``pads_lone_hits``,
        # ``start`` is above 0. The request then has as many tokens as a running request.
        rules = self._rules
        alike = (
            rules.pads_admissions and not chunks and (ran or (rules.pads_lone_hits and start > 0))
        )
        n = 1 + self.most
        if not alike:
            return 1
        if start + n + rules.skips_padding_without_room > self._longest:
            return 1 if rules.skips_padding_without_room else 0
        return n if n <= budget else 0

    def verified(self, r: RequestState, n: int, batch: Batch) -> int:
        """Return the number of drafts among the ``n`` scheduled tokens of ``r``.

        The number is also recorded in the batch.
        """
        # vLLM counts all drafts, even if the step is shortened at the end of a block.
        drafted = self.most if r.is_padded else n + r.computed - r.length - r.placeholders
        r.is_padded = False
        if drafted <= 0:
            return 0
        assert batch.drafted is not None
        batch.drafted.tokens[r.id] = drafted
        if r.fresh or r.discards_drafts:
            batch.drafted.padding.add(r.id)
        return drafted

    def propose(self, r: RequestState) -> None:
        """Set the number of drafts of ``r`` for the step after the current one."""
        fresh, r.fresh = r.fresh, False
        if not r.chunk or self._for_chunks:
            r.drafts, r.discards_drafts = self.most, r.chunk
        elif fresh and r.drafts and self._stay:
            r.discards_drafts = True  # these drafts are from before a preemption of the request
        else:
            r.drafts = 0

    def preempted(self, r: RequestState, had: int) -> None:
        """Discard the drafts of the preempted request ``r``.

        ``had`` is the number of tokens of ``r`` that the step had scheduled. If it is 0, releases
        with the rule ``keeps_preempted_drafts`` keep the drafts.
        """
        if had or not self._rules.keeps_preempted_drafts:
            r.drafts = 0

    def deliver(self, r: RequestState, batch: Batch, *, stale: bool) -> int:
        """Return the number of tokens that ``r`` received in a completed batch.

        The tokens of rejected drafts are subtracted from the counts of ``r``.
        """
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
