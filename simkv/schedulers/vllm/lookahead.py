"""Blocks of vLLM's requests where drafts are verified: held for tokens that may be rejected.

A drafter with KV of its own also has ``num_lookahead_tokens`` slots behind the tokens of a step.
Blocks stay with a request when drafts are rejected, so it may hold more than its tokens need.

EAGLE's KV at a position depends on the next token: a hit is a block shorter than what is found
(``use_eagle``), or since 0.33 the key of a block covers the token behind it.
"""

from __future__ import annotations

from mypy_extensions import mypyc_attr

from simkv.core.blocks import BlockPool
from simkv.core.prefix import BlockKeys
from simkv.schedulers.vllm.config import VllmConfig
from simkv.schedulers.vllm.memory import Hits, VllmMemory
from simkv.schedulers.vllm.requests import RequestState
from simkv.schedulers.vllm.rules import VllmRules


@mypyc_attr(allow_interpreted_subclasses=True, serializable=True)
class DraftMemory(VllmMemory):
    """One kind of blocks for all layers, and the drafter's among them."""

    def __init__(self, config: VllmConfig, rules: VllmRules) -> None:
        super().__init__(config, rules, tables=True)
        eagle = config.speculative_method == "eagle"
        self._lookahead = (
            0 if config.speculative_method == "ngram" else config.num_speculative_tokens
        )
        self._at_first = self._lookahead if rules.lookahead_at_admission else 0
        self._longest = config.max_model_len
        self._drops = eagle and not rules.keys_cover_next
        self._ahead = 1 if eagle and rules.keys_cover_next else 0
        self._keys = BlockKeys(config.block_size, self._ahead)

    def held_by(self, r: RequestState, computed: int) -> int:  # noqa: ARG002
        """Blocks of ``r`` that runs."""
        return self._pool.held(r.id)

    def beyond(self, r: RequestState, start: int, n: int) -> int:
        """What ``r``, which runs, lacks for lookahead slots too, less what it holds for drafts that
        were rejected; beyond the blocks that ``n`` tokens behind ``start`` fill."""
        size, end = self.block_size, start + n
        slots = min(end + self._lookahead, self._longest)
        lacks = max(-(-slots // size) - self._pool.held(r.id), 0)
        return lacks - (-(-end // size) + -start // size)

    def missing(self, hits: Hits, end: int) -> int:
        """Blocks for the tokens up to ``end`` of a request that starts from ``hits``."""
        return super().missing(hits, min(end + self._at_first, self._longest))

    def fits(self, r: RequestState, hits: Hits, end: int, *, running: bool) -> bool:
        """Whether ``r`` may be admitted with ``hits`` to compute its tokens up to ``end``."""
        needed = self.missing(hits, end)
        if self.whole:
            needed = max(needed, super().missing(hits, r.length))
        revived = self.cache.unheld(hits.groups[0]) if self.cache else 0
        return needed + revived <= self.room(running=running)

    def hits(self, r: RequestState) -> Hits:
        """What ``r`` can start from; at least its last token is left to compute."""
        hits = super().hits(r)
        if not self._drops or not hits.tokens:
            return hits
        return Hits(hits.tokens - self.block_size, [hits.groups[0][:-1]])

    def register(self, r: RequestState, tokens: int) -> None:
        """Enter the blocks filled by the first ``tokens`` tokens of ``r`` into the prefix cache."""
        tokens = min(tokens, r.length - self._ahead)
        if tokens // self.block_size > r.registered:
            super().register(r, tokens)

    @property
    def _pool(self) -> BlockPool:
        assert self.tables is not None
        return self.tables
