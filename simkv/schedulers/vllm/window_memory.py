# mypyc: compile
"""Block memory of models with layer groups, some with sliding windows or chunked attention.

vLLM divides layers into groups of equal size, and all layers of a group are of one kind
(``kv_cache_groups``). A request has one block table per group, and all tables use the same pool; a
block holds ``block_size`` tokens of one group. Blocks that have left the window of a group are
freed while the request runs.

Source: ``single_type_kv_cache_manager.py`` and ``kv_cache_coordinator.py`` in ``vllm/v1/core``,
since 0.10:

- A hit needs all blocks up to its end in groups without a window. In groups with a window it needs
  the blocks in the window before the next token.
- Layers with chunked attention see the tokens since the last multiple of the chunk size. A hit
  needs the blocks after the last multiple that the hits of the other groups allow, and no earlier
  block.
- A running request frees the blocks behind its windows before it allocates new ones.
- If the whole sequence must fit at admission, a group with a window counts no more than the maximum
  number of blocks that it holds at a time. With the rule ``reserves_whole_windows``, it counts all
  blocks.
- Groups can have different block sizes (Gemma 4). Cache keys are computed for blocks of
  ``block_size``, the smallest size; a larger block has the key of its last part. Hits end, and
  blocks are registered, at common multiples of all sizes.
- The cache stores all full blocks of groups with windows. With a retention interval of 0, it
  stores only blocks that the same prompt can reuse, or a prompt that diverges at the point where
  the hit of another group ended. With a longer interval, it also stores the windows before its
  multiples (``reachable_block_mask``).
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Hashable
from math import lcm

from mypy_extensions import mypyc_attr

from simkv.core.block_pool import BlockPool
from simkv.core.scheduler_protocol import blocks_for
from simkv.schedulers.vllm.config import VllmConfig
from simkv.schedulers.vllm.layer_group_parser import LayerKind
from simkv.schedulers.vllm.memory import NO_HITS, CacheHits, VllmMemory
from simkv.schedulers.vllm.release_rules import VllmRules
from simkv.schedulers.vllm.request_state import RequestState


@mypyc_attr(allow_interpreted_subclasses=True, serializable=True)
class WindowMemory(VllmMemory):
    """Block tables of several layer groups. ``layers`` contains the kind of each group."""

    # ``_paged`` maps block sizes in tokens to the number of groups that need blocks for every
    # token. A hit ends at a multiple of ``_unit`` tokens. The table of a request in group ``g`` has
    # the owner ``_owners(id)[g]`` in the pool. Its cache keys are the request's keys times the
    # number of groups, plus ``g``. The first ``gone`` blocks of a table have been freed.

    def __init__(self, config: VllmConfig, rules: VllmRules) -> None:
        super().__init__(config, rules, tables=True)
        self.frees_while_running = True
        self.fills_at_once = False
        # A cached group of states needs two blocks: the state before the next token and the new
        # state.
        kept = 2 if self.cache else 0
        self.layers = [k._replace(window=kept) if k.states else k for k in config.layer_kinds]
        self._kinds = sorted(dict.fromkeys(self.layers), key=has_limited_attention)
        self._sizes = [kind.block_size for kind in self.layers]
        self._paged = Counter(self._sizes)
        self._unit, size = lcm(*self._sizes), config.block_size
        self._fills = self._unit if rules.caches_aligned_only else size
        self._most = [config.most_blocks(kind) for kind in config.layer_kinds]
        self._bounded = not rules.reserves_whole_windows
        self._processed = rules.frees_after_steps
        self._peek = 0  # tokens after the longest possible hit that are also looked up
        self._keyless_behind = rules.reuses_uncached_first or rules.reuses_uncached_windows_first
        self._interval = config.retention_interval(rules)
        # Numbers of tokens before a block is full at which another block leaves a window; one step
        # later if tokens in flight do not count as computed.
        windows = [kind.window for kind in self.layers if kind.window]
        phases = {(ahead - window) % size for window in windows for ahead in (0, 1)}
        phases |= {size - 1} if any(kind.chunk for kind in self.layers) else set()
        self.aheads = tuple(dict.fromkeys((*self.aheads, *sorted(phases))))

    def blocks_held_by(self, r: RequestState, computed: int) -> int:  # noqa: ARG002
        """Return the number of blocks of ``r`` in all groups."""
        return sum(self._pool.held(owner) for owner in self._owners(r.id))

    def missing(self, hits: CacheHits, end: int) -> int:
        """Return the number of new blocks for the first ``end`` tokens of a waiting request.

        The cached blocks ``hits`` are not counted.
        """
        return self._in_all(hits.tokens, end)

    def blocks_to_grow(self, computed: int, n: int) -> int:
        """Return the number of new blocks for ``n`` tokens after ``computed`` tokens."""
        return self._in_all(computed, computed + n)

    def hits(self, r: RequestState) -> CacheHits:
        """Return the longest prefix-cache hit of ``r`` that is common to all groups."""
        if not self.cache or r.content is None or r.computed:
            return NO_HITS._replace(groups=[array("i") for _ in self.layers])
        tokens = r.length - 1 + self._peek
        self._keys.extend(r.keys, r.content, tokens)
        found = [
            self.cache.find(self._keys_of(r, g, 0, tokens // size))
            for g, size in enumerate(self._sizes)
        ]
        tokens, longest = self._agreed(found, r.length - 1)
        groups = [
            found[g][self._behind(g, tokens) : tokens // size] for g, size in enumerate(self._sizes)
        ]
        r.junction = longest if longest > tokens else 0
        return CacheHits(tokens, groups)

    def fits(self, r: RequestState, hits: CacheHits, end: int, *, running: bool) -> bool:
        """Return whether enough blocks are free to admit ``r`` with its first ``end`` tokens."""
        revived = sum(self._pool.count_unreferenced(blocks) for blocks in hits.groups)
        start, whole = hits.tokens, 0
        if self.whole:
            whole = self._in_whole(start, r.length)
            whole += self.beyond(r, start, r.length - start)
        needed = max(self.missing(hits, end) + self.beyond(r, start, end - start), whole)
        return needed + revived <= self.room(running=running)

    def share(self, r: RequestState, hits: CacheHits) -> None:
        """Add the cached blocks ``hits`` to the empty block tables of ``r``."""
        r.registered = hits.tokens // self.block_size
        r.gone = [self._behind(g, hits.tokens) for g in range(len(self.layers))]
        for owner, blocks in zip(self._owners(r.id), hits.groups, strict=True):
            self._pool.share(owner, blocks)

    def free_unneeded(self, r: RequestState, computed: int, in_flight: int) -> None:
        """Free the blocks that have left the sliding windows."""
        tokens = computed - in_flight if self._processed else computed
        for g, owner in enumerate(self._owners(r.id)):
            self._let_go_of(r, g, owner, tokens)

    def take(self, r: RequestState, count: int, end: int) -> None:  # noqa: ARG002
        """Allocate free blocks for the first ``end`` tokens of ``r``."""
        end = self._with_slots(r, end)
        for g, owner in enumerate(self._owners(r.id)):
            self._take_for(r, g, owner, blocks_for(end, self._sizes[g]))

    def register(self, r: RequestState, tokens: int) -> None:
        """Add to the prefix cache the blocks that the first ``tokens`` tokens of ``r`` fill."""
        size = self.block_size
        full = self._keyed(r, tokens // self._fills * self._fills) // size
        if not self.cache or r.content is None or full <= r.registered:
            return
        self._keys.extend(r.keys, r.content, full * size)
        for g, owner in enumerate(self._owners(r.id)):
            known, filled = (blocks * size // self._sizes[g] for blocks in (r.registered, full))
            for start, end in self._worth(r, g, known, filled):
                self._register_of(r, g, owner, range(max(start, known), min(end, filled)))
        r.registered = full

    def release(self, r: RequestState, unused: int = 0) -> None:  # noqa: ARG002
        """Free the blocks of ``r``."""
        for kind, owner in zip(self.layers, self._owners(r.id), strict=True):
            window = self._keyless_behind and kind.window > 0 and not kind.states
            self._pool.release(owner, keyless_first=self._keyless_first or window)

    def blocks_of(self, request_id: int) -> list[int]:
        """Return the ids of the blocks of a request, group by group."""
        tables = (self._pool.tables.get(owner, ()) for owner in self._owners(request_id))
        return [block for table in tables for block in table]

    def fingerprint(self) -> Hashable:
        """Return the state that determines later allocations."""
        return super().fingerprint(), tuple(self._pool.holdings().items())

    @property
    def _pool(self) -> BlockPool:
        assert self.tables is not None
        return self.tables

    def _keyed(self, r: RequestState, tokens: int) -> int:  # noqa: ARG002
        """Return the number of tokens whose full blocks have cache keys.

        Only the first ``tokens`` tokens of ``r`` are considered.
        """
        return tokens

    def _with_slots(self, r: RequestState, end: int) -> int:  # noqa: ARG002
        """Return the number of tokens that need blocks when ``r`` computes tokens up to ``end``."""
        return end

    def _in_all(self, start: int, end: int) -> int:
        """Return the number of new blocks in all groups for the tokens from ``start`` to
        ``end``.
        """
        return sum(
            count * max(blocks_for(end, size) - blocks_for(start, size), 0)
            for size, count in self._paged.items()
        )

    def _in_whole(self, start: int, end: int) -> int:
        """Return the maximum number of blocks of a sequence up to ``end``, without its cached
        blocks.
        """
        limits = self._most if self._bounded else [blocks_for(end, size) for size in self._sizes]
        return sum(
            max(min(blocks_for(end, size), most) - start // size, 0)
            for size, most in zip(self._sizes, limits, strict=True)
        )

    def _agreed(self, found: list[array[int]], tokens: int) -> tuple[int, int]:
        """Return the longest hit common to all groups, and the longest hit of any single group.

        ``found`` holds the cached blocks by group. Lengths are in tokens, at most ``tokens``.
        """
        longest, before = 0, -1
        while tokens != before:
            before = tokens
            for kind in self._kinds:
                tokens = self._hit_of(kind, self._alike(kind, found), tokens)
                longest = max(longest, tokens)
        return tokens, longest

    def _alike(self, kind: LayerKind, found: list[array[int]]) -> list[array[int]]:
        """Return the entries of ``found`` for the groups of a kind."""
        return [there for there, other in zip(found, self.layers, strict=True) if other == kind]

    def _hit_of(self, kind: LayerKind, groups: list[array[int]], tokens: int) -> int:
        """Return the length in tokens of the longest hit in the groups of a kind, at most
        ``tokens``.
        """
        size = kind.block_size
        if kind.chunk:
            return _behind_last(groups, tokens // size, kind.chunk // size) * size
        return longest_run(groups, tokens // size, window_blocks(kind), self._unit // size) * size

    def _let_go_of(self, r: RequestState, g: int, owner: int, tokens: int) -> None:
        gone = r.gone
        if (behind := self._behind(g, tokens)) > gone[g]:
            count = min(behind - gone[g], self._pool.held(owner))
            self._pool.release_head(owner, count, keyless_first=self._keyless_behind)
            gone[g] += count

    def _take_for(self, r: RequestState, g: int, owner: int, blocks: int) -> None:
        """Extend the block table of a group to ``blocks`` entries."""
        self._pool.take(owner, max(blocks - r.gone[g] - self._pool.held(owner), 0))

    def _register_of(self, r: RequestState, g: int, owner: int, blocks: range) -> None:
        """Register the given blocks of a group's table, except those already freed."""
        gone, table = r.gone[g], self._pool.tables[owner]
        start, end = max(blocks.start, gone), blocks.stop
        if start < end:
            keys = self._keys_of(r, g, start, end)
            self._pool.register_all(table[start - gone : end - gone], keys)

    def _owners(self, request_id: int) -> range:
        """Return the pool owners of the request's tables, by group."""
        groups = len(self.layers)
        return range(request_id * groups, (request_id + 1) * groups)

    def _keys_of(self, r: RequestState, g: int, start: int, end: int) -> array[int]:
        groups, parts = len(self.layers), self._sizes[g] // self.block_size
        keys = r.keys[(start + 1) * parts - 1 : end * parts : parts]
        return array("q", [key * groups + g for key in keys])

    def _behind(self, g: int, tokens: int) -> int:
        """Return the number of blocks before the window or chunk of the token after ``tokens``."""
        kind = self.layers[g]
        if kind.chunk:
            return tokens // kind.chunk * (kind.chunk // kind.block_size)
        return max(tokens - kind.window + 1, 0) // kind.block_size if kind.window else 0

    def _worth(self, r: RequestState, g: int, known: int, full: int) -> list[tuple[int, int]]:
        """Return the ranges of blocks in a group that are worth caching."""
        # Ranges end after block ``known``; the first ``full`` blocks are filled. A hit needs the
        # last ``reach`` blocks up to its end, and ``past`` blocks after it. With an interval, hits
        # can end at its multiples, which lie ``step`` blocks apart, and at ends of this prompt.
        kind = self.layers[g]
        if not kind.window:
            return [(0, full)]
        reach, past = window_blocks(kind), self._past(kind)
        if self._interval is None:
            ends, step = list[int](), max(self._fills // kind.block_size, 1)
        else:
            ends, step = self._reusable_ends(r, kind), self._interval // kind.block_size
        if step:
            if reach + past >= step:
                return [(0, full)]
            ends += range(max(known // step, 1) * step, full + reach, step)
        return [(end - reach, end + past) for end in ends]

    def _reusable_ends(self, r: RequestState, kind: LayerKind) -> list[int]:
        """Return the block ends at which a hit of the same prompt, or of another one, can end."""
        tokens = {
            where // self._unit * self._unit for where in (r.prompt.prompt_tokens - 1, r.junction)
        }
        return [where // kind.block_size for where in tokens if where]

    def _past(self, kind: LayerKind) -> int:  # noqa: ARG002
        """Return the number of blocks after the end of a hit that must also be cached."""
        return 0


def has_limited_attention(kind: LayerKind) -> bool:
    """Return whether layers attend to only some of the previous tokens."""
    # Hits are determined first for layers that attend to all tokens.
    return kind.window > 0 or kind.chunk > 0


def window_blocks(kind: LayerKind) -> int:
    """Return the number of preceding blocks to which the first token of a block attends.

    The number is 0 for layers without a sliding window.
    """
    return blocks_for(kind.window - 1, kind.block_size) if kind.window else 0


def longest_run(groups: list[array[int]], most: int, reach: int, unit: int) -> int:
    """Return the number of blocks in the longest prefix-cache hit, at most ``most``.

    The last ``reach`` blocks of a hit must be cached in all ``groups``. A hit ends at a multiple of
    ``unit`` blocks.
    """
    # A shorter run of cached blocks is also a hit if it begins at the first block. With ``reach``
    # 0, only a run from the first block is a hit.
    there = [all(blocks) for blocks in zip(*(group[:most] for group in groups), strict=True)]
    run = 0
    for end in range(len(there), 0, -1):
        run = run + 1 if there[end - 1] and (run or end % unit == 0) else 0
        if reach and run == reach:
            return end - 1 + reach
    return run


def _behind_last(groups: list[array[int]], most: int, chunk: int) -> int:
    """Return the number of blocks of the longest hit, at most ``most``.

    Only the blocks after the last multiple of ``chunk`` must be cached.
    """
    blocks = most // chunk * chunk
    while blocks < most and all(group[blocks] for group in groups):
        blocks += 1
    return blocks
