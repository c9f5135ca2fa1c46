# mypyc: compile
"""Block memory for speculative decoding, with KV blocks for draft tokens that may be rejected.

A drafter with its own KV cache also needs ``num_lookahead_tokens`` KV slots after the tokens of a
step. A request keeps its blocks when drafts are rejected, so it may hold more blocks than its
tokens need.

EAGLE's KV at a position depends on the next token. A prefix-cache hit is therefore one block
shorter than the cached prefix (``use_eagle``). Since 0.33 the cache key of a block covers the next
token instead, and hits are not shortened.
"""

from __future__ import annotations

from array import array

from mypy_extensions import mypyc_attr

from simkv.core.block_keys import BlockKeys
from simkv.core.scheduler_protocol import blocks_for
from simkv.schedulers.vllm.config import VllmConfig
from simkv.schedulers.vllm.layer_group_parser import LayerKind
from simkv.schedulers.vllm.memory import CacheHits
from simkv.schedulers.vllm.release_rules import VllmRules
from simkv.schedulers.vllm.request_state import RequestState
from simkv.schedulers.vllm.state_memory import StateMemory, StateTable
from simkv.schedulers.vllm.window_memory import has_limited_attention, longest_run, window_blocks


@mypyc_attr(allow_interpreted_subclasses=True, serializable=True)
class DraftMemory(StateMemory):
    """KV blocks of a model with a drafter."""

    # The drafter's layers belong to one of the model's layer groups.

    def __init__(self, config: VllmConfig, rules: VllmRules) -> None:
        super().__init__(config, rules)
        self._lookahead = (
            0 if config.speculative_method == "ngram" else config.num_speculative_tokens
        )
        self._at_first = self._lookahead if rules.lookahead_at_admission else 0
        self._longest = config.max_model_len
        self._drops = config.drops_block(rules)
        self._peek = 1 if self._drops and rules.looks_up_last_block else 0
        self._replays = rules.caches_shortened_hits
        self._ahead = 1 if config.drafts_from_states and rules.keys_cover_next_token else 0
        self._keys = BlockKeys(config.block_size, self._ahead)
        self.frees_while_running = config.kv_cache_groups != (0,)

    def beyond(self, r: RequestState, start: int, n: int) -> int:
        """Return the number of blocks for lookahead slots and for states after draft tokens.

        The number is negative if a request has unused blocks because drafts were rejected.
        """
        end, table = start + n, self._tables[r.id]
        within = int(super().beyond(r, start, n) > 0)
        states, end = table.lacks(self._states_to(end), within), self._with_slots(r, end)
        needed = sum(self._single) * states - self.blocks_to_grow(start, n)
        for g, owner in enumerate(self._owners(r.id)):
            if not self._single[g]:
                blocks = blocks_for(end, self._sizes[g])
                needed += max(blocks - r.gone[g] - self._pool.held(owner), 0)
        return needed

    def missing(self, hits: CacheHits, end: int) -> int:
        """Return the number of new blocks for the first ``end`` tokens of a waiting request.

        The cached blocks ``hits`` are not counted.
        """
        return self._admitting(hits, end, min(end + self._at_first, self._longest), 0)

    def fits(self, r: RequestState, hits: CacheHits, end: int, *, running: bool) -> bool:
        """Return whether enough blocks are free to admit ``r`` with its first ``end`` tokens.

        ``r`` reuses the cached blocks ``hits``. ``running`` is true if other requests run.
        """
        if self.has_unready_hits(r, hits):
            return False
        start, whole = hits.tokens, 0
        if self.whole:
            within = int(super().beyond(r, start, r.length - start) > 0)
            whole = self._admitting(hits, r.length, r.length, within, whole=True)
        within = int(super().beyond(r, start, end - start) > 0)
        slots = min(end + self._at_first, self._longest)
        needed = max(self._admitting(hits, end, slots, within), whole)
        revived = sum(self._pool.count_unreferenced(blocks) for blocks in hits.groups)
        return needed + revived <= self.room(running=running)

    def register(self, r: RequestState, tokens: int) -> None:
        """Add to the prefix cache the blocks that the first ``tokens`` tokens of ``r`` fill."""
        super().register(r, tokens)
        if self._ahead and self._unit > self.block_size and self.cache and r.content is not None:
            self._register_tails(r, tokens // self._unit * self._unit)

    def _agreed(self, found: list[array[int]], tokens: int) -> tuple[int, int]:
        # For each kind of layers, one block more than the hit is looked up, and the hit is
        # shortened by one block. This repeats when another kind shortens the common hit. Hits of
        # states are not shortened.
        if not self._drops:
            return super()._agreed(found, tokens)
        kinds, size = self._kinds, self.block_size
        most = len(found[0]) * size if self._peek else tokens
        whole: dict[LayerKind, int] = {}
        longest, dropped = 0, set[LayerKind]()
        while True:
            left = tokens
            for kind in kinds:
                if kind in whole:
                    left = min(left, whole[kind])
                    continue
                first = kind not in dropped
                drops = first and not kind.states
                looked = min(left + size, most) if drops and len(kinds) > 1 else left
                hit = self._less_one(kind, self._alike(kind, found), looked // size, drops=drops)
                if first:
                    dropped.add(kind)
                elif hit < left:
                    dropped.clear()
                left, longest = hit, max(longest, hit)
                if not has_limited_attention(kind):
                    whole[kind] = hit
            if left >= tokens:
                return tokens, longest
            tokens = left
            if len(kinds) == 1 or (len(kinds) == 2 and whole):
                return tokens, longest

    def _less_one(
        self, kind: LayerKind, groups: list[array[int]], most: int, *, drops: bool
    ) -> int:
        """Return the length in tokens of the longest hit for layers of ``kind``.

        The hit has at most ``most`` blocks. With ``drops``, the last cached block is left out
        (EAGLE).
        """
        reach = window_blocks(kind)
        blocks = longest_run(groups, most, reach + drops if reach else 0, 1)
        return max(blocks - drops, 0) * self.block_size

    def _reusable_ends(self, r: RequestState, kind: LayerKind) -> list[int]:
        size, prompt = self.block_size, r.prompt.prompt_tokens
        if not self._drops:
            return super()._reusable_ends(r, kind)
        ends = {(prompt - 1) // size}
        if self._replays:
            ends = {max(tokens // size - 1, 0) for tokens in (prompt - 1, prompt)}
        if r.junction:
            ends.add(r.junction // size)
        return list(ends)

    def _past(self, kind: LayerKind) -> int:
        return int(self._drops and not kind.states)

    def _register_tails(self, r: RequestState, tokens: int) -> None:
        """Cache the partly filled last block of a prompt, for groups with a larger block size."""
        # The block has the key of the last full block of ``block_size`` tokens inside it.
        size = self.block_size
        end = self._keyed(r, r.prompt.prompt_tokens - 1) // size * size
        for g, owner in enumerate(self._owners(r.id)):
            (place, rest), full = divmod(end, self._sizes[g]), r.registered * size // self._sizes[g]
            if not self.layers[g].window and rest and end <= tokens and place >= full:
                key = r.keys[end // size - 1] * len(self.layers) + g
                self._pool.register(self._pool.tables[owner][place], key)

    def _register_of(self, r: RequestState, g: int, owner: int, blocks: range) -> None:
        table = self._pool.tables[owner]
        if self._sizes[g] > self.block_size and not self.layers[g].window and blocks:
            # the block may be registered under the key of its first part
            self._pool.forget(table[blocks.start])
        super()._register_of(r, g, owner, blocks)

    def _keyed(self, r: RequestState, tokens: int) -> int:
        return min(tokens, r.length - self._ahead)

    def _with_slots(self, r: RequestState, end: int) -> int:
        slots = self._at_first if r.fresh else self._lookahead
        return min(end + slots, self._longest)

    def _admitting(
        self, hits: CacheHits, end: int, slots: int, within: int, *, whole: bool = False
    ) -> int:
        """Return the number of blocks to allocate in all groups for a waiting request.

        The blocks hold the tokens up to ``end`` and draft slots up to ``slots``. Cached blocks are
        not counted.
        """
        hit = hits.tokens // self.block_size
        needed = StateTable(hit, self._spare).lacks(self._states_to(end), within)
        needed *= sum(self._single)
        for size, most, single in zip(self._sizes, self._most, self._single, strict=True):
            if not single:
                blocks = blocks_for(slots, size)
                blocks = min(blocks, most) if whole else blocks
                needed += max(blocks - hits.tokens // size, 0)
        return needed
