"""Blocks of models some of whose layers keep a state: Mamba, linear attention (``mamba`` groups).

A state is of all tokens so far and fills one block, whatever their number. ``MambaManager`` of
``single_type_kv_cache_manager.py`` in ``vllm/v1/core``, 0.21.0 to 0.33.0, keeps them in three ways
(``mamba_cache_mode``):

- Without a prefix cache a request has one block in such a group from its admission to its end.
- ``align``: a chunk writes its state into a new block, at the place of its last token in the table;
  the places between are empty. The state before it is given back when the step is done, and kept in
  the cache if it is at the end of a block. Nobody starts in a step from a state of this very step.
- ``all``: a state is written for each block. To the blocks that is a window of two tokens.

Where drafts are verified, a request has a ``spare`` block for each of them behind the newest state:
one of the states after a draft is the one to go on from. They move along at the end of the table.
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
    """The ``places`` of a request's blocks in each table of ``length``, as all groups have them.

    In ``older`` is the state from which the newest one was computed; -1 if it began with none.
    ``begun``: it has all of its ``spare`` blocks.
    """

    def __init__(self, hit: int, spare: int = 0) -> None:
        self.places = [hit - 1] if hit else []
        self.length = hit
        self.older = -1
        self.spare = spare
        self.begun = False

    def lacks(self, blocks: int, within: int) -> int:
        """Blocks more for a newest state at the last of so many places, and so many ``within``.

        Below 0 where rejected drafts had more, which vLLM takes off what other groups lack.
        """
        most = 1 + within + (0 if self.begun else self.spare)
        return min(blocks + self.spare - self.length, most)

    def reach(self, blocks: int, within: int) -> tuple[list[int], int]:
        """Let the newest state be at the last of so many places, with so many ``within`` before it.

        Returns which places of blocks, one after the other, move behind all others, and how many
        new blocks follow these.
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
        """Whether a state within a chunk that ends in the last of so many blocks has a place."""
        place = blocks - 2
        scratch = self.begun and place >= self.length - self.spare
        return place >= self.length or scratch or place not in self.places

    def behind(self, blocks: int, *, gaps: bool) -> list[list[int]]:
        """Places to let go of when the newest token is in the last of ``blocks``, in two turns.

        Unless it can pass ``gaps``, the first turn ends at one.
        """
        end = min(blocks - 1, self.length)
        first = [place for place in reversed(self.places) if place < end]
        if not gaps:
            run = (end - 1 - i for i in range(len(first)))
            first = [place for place, expected in zip(first, run, strict=True) if place == expected]
        older = self.older if self.older < blocks - 1 else -1
        return [first, [older] if older in self.places and older not in first else []]


@mypyc_attr(allow_interpreted_subclasses=True, serializable=True)
class StateMemory(WindowMemory):
    """Tables of several groups, some of which have states: in ``_single`` one at a time.

    ``_tables`` are by request; ``_fresh`` are the keys of states that this step registered. Those
    ``_within`` their next chunk write a state more.
    """

    def __init__(self, config: VllmConfig, rules: VllmRules) -> None:
        super().__init__(config, rules)
        self._mode, self._gaps = config.states(rules), rules.frees_gaps
        self._states = [kind.states for kind in self.layers]
        self._single = [state and self._mode != "all" for state in self._states]
        self._paged[self.block_size] -= sum(self._single)
        self._tables: dict[int, StateTable] = {}
        self._fresh: set[int] = set()
        self._marks_again = rules.marks_again and len(self.layers) > 1
        self._exports = config.mamba_prefill_checkpoints and self._mode == "align"
        self._spare = config.num_speculative_tokens
        self._within: set[int] = set()

    def begin(self) -> None:
        """A step begins."""
        self._fresh.clear()

    def blocks_to_grow(self, computed: int, n: int) -> int:
        """Blocks more for ``n`` tokens behind ``computed`` ones."""
        needed = super().blocks_to_grow(computed, n)
        return needed - sum(self._single) if needed and self._mode == "none" else needed

    def beyond(self, r: RequestState, start: int, n: int) -> int:
        """Blocks for states within the last chunk of a prompt."""
        end, prefill = start + n, max(r.prompt.prompt_tokens, r.length - 1)
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
        """Whether ``r`` may be admitted with ``hits`` to compute its tokens up to ``end``."""
        return not self.has_unready_hits(r, hits) and super().fits(r, hits, end, running=running)

    def has_unready_hits(self, r: RequestState, hits: CacheHits) -> bool:
        """Whether ``hits`` are of this very step: nobody can start from them before the next."""
        last = hits.tokens // self.block_size - 1
        return last >= 0 and r.keys[last] in self._fresh

    def share(self, r: RequestState, hits: CacheHits) -> None:
        """Let ``r``, which has no blocks, start from ``hits``."""
        super().share(r, hits)
        self._tables[r.id] = StateTable(hits.tokens // self.block_size, self._spare)

    def free_unneeded(self, r: RequestState, computed: int, in_flight: int) -> None:
        """Give back what no window reaches into any more, and older states, group by group."""
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
        """Blocks for the tokens of ``r`` up to ``end``, group by group; they are free."""
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
        """Enter the blocks filled by the first ``tokens`` tokens of ``r`` into the prefix cache."""
        super().register(r, tokens)
        if self._marks_again and self._mode == "align":
            place = (r.prompt.prompt_tokens - 1) // self.block_size - 1
            full = tokens // self.block_size - 1
            if full == place >= 0 and place in self._tables[r.id].places:
                self._fresh.add(r.keys[place])

    def release(self, r: RequestState, unused: int = 0) -> None:
        """Take the blocks of ``r`` back, group by group."""
        super().release(r, unused)
        self._tables.pop(r.id, None)

    def fingerprint(self) -> Hashable:
        """What decides later allocations."""
        tables = ((i, tuple(t.places), t.length, t.older) for i, t in self._tables.items())
        return super().fingerprint(), tuple(tables)

    def _states_to(self, end: int) -> int:
        """Places up to that of the state after the token ``end``."""
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
        """Give back the blocks at some of the places that a table has blocks at."""
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
