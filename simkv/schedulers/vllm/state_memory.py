# mypyc: compile
"""Block memory of models in which some layers have a state (``mamba`` groups).

Mamba and linear attention layers have one state for all previous tokens. A state fills one block
for any number of tokens. ``MambaManager`` in ``vllm/v1/core/single_type_kv_cache_manager.py``
(since 0.21.0) stores states in one of three ways (``mamba_cache_mode``):

- Without a prefix cache, a request holds one block in such a group from admission to end.
- ``align``: a chunk writes its state into a new block at the position of its last token in the
  table; positions in between are empty. The previous state is freed after the step, and stays in
  the cache if it is at the end of a block. No request starts from a state in the step that writes
  it.
- ``all``: a state is written for each block. For block allocation this equals a window of two
  tokens.

With drafts, a request has one ``spare`` block per draft after the newest state, because
verification continues from the state after the last accepted draft. The spare blocks stay at the
end of the table when it grows.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable

from mypy_extensions import mypyc_attr

from simkv.core.scheduler_protocol import blocks_for
from simkv.schedulers.vllm.config import VllmConfig
from simkv.schedulers.vllm.memory import CacheHits
from simkv.schedulers.vllm.release_rules import VllmRules
from simkv.schedulers.vllm.request_state import RequestState
from simkv.schedulers.vllm.state_chunking import has_inner_state
from simkv.schedulers.vllm.window_memory import WindowMemory


@mypyc_attr(allow_interpreted_subclasses=True, serializable=True)
class StateTable:
    """Block table of a request's recurrent states.

    - ``places``: positions that contain a block.
    - ``length``: number of all positions.
    - ``older``: position of the second newest state, or -1.
    - ``spare``: number of blocks for the states after draft tokens.
    - ``begun``: whether all spare blocks are allocated.
    """

    def __init__(self, hit: int, spare: int = 0) -> None:
        self.places = [hit - 1] if hit else []
        self.length = hit
        self.older = -1
        self.spare = spare
        self.begun = False

    def lacks(self, blocks: int, within: int) -> int:
        """Return the number of blocks to allocate before the newest state moves to a position.

        The position is ``blocks`` - 1. ``within`` is the number of states inside the chunk.
        """
        # The result is negative if rejected drafts left extra blocks; vLLM subtracts these from the
        # needs of other groups.
        most = 1 + within + (0 if self.begun else self.spare)
        return min(blocks + self.spare - self.length, most)

    def reach(self, blocks: int, within: int) -> tuple[list[int], int]:
        """Extend the table so that the newest state is at position ``blocks`` - 1.

        ``within`` is the number of states inside the chunk. Returns the indices of the blocks that
        move to the end of the table, and the number of new blocks.
        """
        before, wanted, begun = self.length, blocks + self.spare, self.begun
        self.begun = True
        if wanted <= before and not within:
            return [], 0
        if begun or before:
            self.older = before - 1 - (self.spare if begun else 0)
        kept = blocks - 1 - within
        moved = []
        self.length = max(before, kept)
        for place in range(before - self.spare, before) if begun else ():
            if place < kept:
                moved.append(self.places.index(place))
                self.places.remove(place)
                self.places.append(self.length)
                self.length += 1
        new = max(wanted - self.length, 0)
        self.places += range(self.length, self.length + new)
        self.length += new
        return moved, new

    def writes_within(self, blocks: int) -> bool:
        """Return whether a chunk can also save the state before its last one.

        The chunk ends in block ``blocks`` - 1.
        """
        # The chunk can save the state if the position contains no block, or only a spare one.
        place = blocks - 2
        scratch = self.begun and place >= self.length - self.spare
        return place >= self.length or scratch or place not in self.places

    def behind(self, blocks: int, *, gaps: bool) -> list[list[int]]:
        """Return the positions of blocks that can be freed.

        The newest token is in block ``blocks`` - 1.
        """
        # The first list contains the positions before this block, the last one first. Without
        # ``gaps``, it ends at the first position that contains no block. The second list contains
        # the position ``older`` if the first list does not.
        end = min(blocks - 1, self.length)
        first = [place for place in reversed(self.places) if place < end]
        if not gaps:
            run = (end - 1 - i for i in range(len(first)))
            first = [place for place, expected in zip(first, run, strict=True) if place == expected]
        older = self.older if self.older < blocks - 1 else -1
        return [first, [older] if older in self.places and older not in first else []]


@mypyc_attr(allow_interpreted_subclasses=True, serializable=True)
class StateMemory(WindowMemory):
    """Block tables of several layer groups, some with recurrent states."""

    # The groups in ``_single`` have one state at a time. ``_tables`` maps request ids to state
    # tables. ``_fresh`` holds the keys of states registered in this step. The next chunk of each
    # request in ``_within`` writes an additional state.

    def __init__(self, config: VllmConfig, rules: VllmRules) -> None:
        super().__init__(config, rules)
        self._mode, self._gaps = config.states(rules), rules.frees_states_behind_gaps
        self._states = [kind.states for kind in self.layers]
        self._single = [state and self._mode != "all" for state in self._states]
        self._paged[self.block_size] -= sum(self._single)
        self._tables: dict[int, StateTable] = {}
        self._fresh: set[int] = set()
        self._marks_again = rules.marks_end_state_again and len(self.layers) > 1
        self._exports = config.mamba_prefill_checkpoints and self._mode == "align"
        self._spare = config.num_speculative_tokens
        self._within: set[int] = set()

    def begin(self) -> None:
        """Discard the keys of states that the previous step registered."""
        self._fresh.clear()

    def blocks_to_grow(self, computed: int, n: int) -> int:
        """Return the number of new blocks for ``n`` tokens after ``computed`` tokens."""
        needed = super().blocks_to_grow(computed, n)
        return needed - sum(self._single) if needed and self._mode == "none" else needed

    def beyond(self, r: RequestState, start: int, n: int) -> int:
        """Return the number of blocks for states inside a chunk.

        With a retention interval of 0, only the last chunk of a prompt saves such a state.
        """
        end, prefill = start + n, max(r.prompt.prompt_tokens, r.length - 1)
        prefill = prefill if self._interval == 0 else 0
        self._within.discard(r.id)
        if (
            not self._exports
            or end < prefill
            or not has_inner_state(start, end, end, self.block_size)
        ):
            return 0
        table = self._tables.get(r.id)
        if table and not table.writes_within(blocks_for(end, self.block_size)):
            return 0
        self._within.add(r.id)
        return sum(self._single)

    def fits(self, r: RequestState, hits: CacheHits, end: int, *, running: bool) -> bool:
        """Return whether enough blocks are free to admit ``r`` with its first ``end`` tokens."""
        return not self.has_unready_hits(r, hits) and super().fits(r, hits, end, running=running)

    def has_unready_hits(self, r: RequestState, hits: CacheHits) -> bool:
        """Return whether the current step is still writing the state in ``hits``."""
        last = hits.tokens // self.block_size - 1
        return last >= 0 and r.keys[last] in self._fresh

    def share(self, r: RequestState, hits: CacheHits) -> None:
        """Add the cached blocks ``hits`` to the empty block tables of ``r``."""
        super().share(r, hits)
        self._tables[r.id] = StateTable(hits.tokens // self.block_size, self._spare)

    def free_unneeded(self, r: RequestState, computed: int, in_flight: int) -> None:
        """Free old states, and free the blocks outside the sliding windows."""
        tokens = computed - in_flight if self._processed else computed
        table, turns = self._tables[r.id], list[list[int]]()
        if self._mode == "align":
            turns = table.behind(blocks_for(tokens, self.block_size), gaps=self._gaps)
        for g, owner in enumerate(self._owners(r.id)):
            if self._single[g]:
                self._drop(owner, table.places, turns)
            else:
                self._let_go_of(r, g, owner, tokens)
        table.places = [p for p in table.places if not any(p in places for places in turns)]

    def take(self, r: RequestState, count: int, end: int) -> None:  # noqa: ARG002
        """Allocate free blocks for the first ``end`` tokens of ``r``."""
        states, end = self._states_to(end), self._with_slots(r, end)
        within = int(r.id in self._within)
        self._within.discard(r.id)
        moved, new = self._tables[r.id].reach(states, within)
        for g, owner in enumerate(self._owners(r.id)):
            if not self._single[g]:
                self._take_for(r, g, owner, blocks_for(end, self._sizes[g]))
                continue
            for place in moved:
                self._pool.to_end(owner, place)
            if new:
                self._pool.take(owner, new)

    def register(self, r: RequestState, tokens: int) -> None:
        """Add to the prefix cache the blocks that the first ``tokens`` tokens of ``r`` fill."""
        super().register(r, tokens)
        if self._marks_again and self._mode == "align":
            place = (r.prompt.prompt_tokens - 1) // self.block_size - 1
            full = tokens // self.block_size - 1
            if full == place >= 0 and place in self._tables[r.id].places:
                self._fresh.add(r.keys[place])

    def release(self, r: RequestState, unused: int = 0) -> None:
        """Free the blocks of ``r``."""
        super().release(r, unused)
        self._tables.pop(r.id, None)

    def fingerprint(self) -> Hashable:
        """Return the state that determines later allocations."""
        tables = ((i, tuple(t.places), t.length, t.older) for i, t in self._tables.items())
        return super().fingerprint(), tuple(tables)

    def _states_to(self, end: int) -> int:
        """Return the number of table positions up to the state after token ``end``."""
        return 1 if self._mode == "none" else blocks_for(end, self.block_size)

    def _in_all(self, start: int, end: int) -> int:
        size, paged = self.block_size, super()._in_all(start, end)
        return paged + (sum(self._single) if blocks_for(end, size) > blocks_for(start, size) else 0)

    def _in_whole(self, start: int, end: int) -> int:
        needed = zip(self._sizes, self._most, self._single, strict=True)
        return sum(
            1 if single else max(min(blocks_for(end, size), most) - start // size, 0)
            for size, most, single in needed
        )

    def _drop(self, owner: int, held: list[int], turns: list[list[int]]) -> None:
        """Free the blocks of an owner at the positions in ``turns``."""
        # ``held`` lists all positions of the owner.
        left = held.copy()
        for places, keyless in zip(
            turns, (self._keyless_behind, self._keyless_first), strict=False
        ):
            if places:
                at = [left.index(place) for place in places]
                self._pool.release_at(owner, at, keyless_first=keyless)
                left = [place for place in left if place not in places]

    def _register_of(self, r: RequestState, g: int, owner: int, blocks: range) -> None:
        there = list(range(max(blocks.start, r.gone[g]), blocks.stop))
        if self._single[g]:
            table, places = self._pool.tables[owner], self._tables[r.id].places
            there = [place for place in places if place in blocks]
            held = array("i", [table[places.index(place)] for place in there])
            keys = array("q", [key for p in there for key in self._keys_of(r, g, p, p + 1)])
            self._pool.register_all(held, keys)
        else:
            super()._register_of(r, g, owner, blocks)
        if self._states[g]:
            self._fresh.update(r.keys[place] for place in there)
