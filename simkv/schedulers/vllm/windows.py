"""Blocks of models whose layers do not all attend to everything: groups with windows or chunks.

vLLM puts layers of a kind into groups of equally many layers (``kv_cache_groups``). A request has
a table for each group, all out of one pool, and a block is ``block_size`` tokens of one group. In
a group with a window, blocks that have left it are given back while the request runs.

Rules of ``single_type_kv_cache_manager.py`` and ``kv_cache_coordinator.py`` in
``vllm/v1/core``, 0.21.0 to 0.33.0, for groups of one block size:

- A hit needs all blocks up to its end in groups without a window, and in the others those that the
  window before the next token reaches into.
- Layers with chunks attend to what follows the last multiple of so many tokens: a hit there needs
  the blocks behind the last such multiple that others allow, and nothing before it.
- A running request lets go of what is behind its windows before it asks for more.
- Where the whole sequence must fit at admission, a group with a window counts at most the blocks
  that it ever has at a time.
- Groups with windows keep all full blocks in the cache, or only what the same prompt could start
  from, or one that parts from it where the hit of another group ended (``keeps_boundaries``).
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable

from mypy_extensions import mypyc_attr

from simkv.core.blocks import BlockPool
from simkv.core.scheduler import blocks_for
from simkv.schedulers.vllm.config import VllmConfig, chunk_of
from simkv.schedulers.vllm.memory import NO_HITS, Hits, VllmMemory
from simkv.schedulers.vllm.requests import RequestState
from simkv.schedulers.vllm.rules import VllmRules


@mypyc_attr(allow_interpreted_subclasses=True, serializable=True)
class WindowMemory(VllmMemory):
    """Tables of several groups; ``windows`` has the tokens of each one's window, 0 for none, and
    ``_chunks`` those of its chunks.

    The table of a request in group ``g`` is the pool's of owner ``_owner(id, g)``, and its keys in
    the cache are the request's, times the number of groups, plus ``g``. A table lacks the blocks
    that are ``gone`` at its head.
    """

    def __init__(self, config: VllmConfig, rules: VllmRules) -> None:
        super().__init__(config, rules, tables=True)
        self.recycles = True
        # Of states that are kept, the one before the next token is needed, and that is written.
        kept = 2 if self.cache else 0
        self.windows = tuple(
            (kept if g == "mamba" else 0) if isinstance(g, str) else g
            for g in config.kv_cache_groups
        )
        self._chunks = tuple(chunk_of(g) for g in config.kv_cache_groups)
        self._kept, size = config.kv_cache_groups, config.block_size
        self._reach = [blocks_for(window - 1, size) if window else 0 for window in self.windows]
        self._most = [config.most_blocks(group) for group in config.kv_cache_groups]
        seen = zip(self.windows, self._chunks, strict=True)
        self._kinds = sorted(dict.fromkeys(seen), key=any)  # who sees all comes first
        self._processed = rules.frees_processed
        self._keyless_behind = rules.keyless_first or rules.keyless_windows
        self._boundaries = rules.keeps_boundaries
        # What leaves a window leaves it so many tokens before a block is full; one step later
        # where tokens under way count as not computed.
        phases = {(ahead - window) % size for window in self.windows if window for ahead in (0, 1)}
        phases |= {size - 1} if any(self._chunks) else set()
        self.aheads = tuple(dict.fromkeys((*self.aheads, *sorted(phases))))

    def held_by(self, r: RequestState, computed: int) -> int:  # noqa: ARG002
        """Blocks of ``r`` that runs, in all groups."""
        return sum(self._pool.held(owner) for owner in self._owners(r.id))

    def missing(self, hits: Hits, end: int) -> int:
        """Blocks for the tokens up to ``end`` of a request that starts from ``hits``."""
        each = blocks_for(end, self.block_size) - hits.tokens // self.block_size
        return self._in_all(max(each, 0))

    def to_grow(self, computed: int, n: int) -> int:
        """Blocks more for ``n`` tokens behind ``computed`` ones."""
        return self._in_all(super().to_grow(computed, n))

    def hits(self, r: RequestState) -> Hits:
        """What ``r`` can start from: each kind of groups shortens what those before it allow."""
        if not self.cache or r.content is None or r.computed:
            return NO_HITS._replace(groups=[array("i") for _ in self.windows])
        blocks = (r.length - 1) // self.block_size
        self._keys.extend(r.keys, r.content, blocks * self.block_size)
        found = [self.cache.find(self._keys_of(r, g, 0, blocks)) for g in range(len(self.windows))]
        longest, before = 0, -1
        while blocks != before:
            before = blocks
            for window, chunk in self._kinds:
                seen = zip(found, self.windows, self._chunks, strict=True)
                alike = [there for there, *kind in seen if kind == [window, chunk]]
                if chunk:
                    blocks = _behind_last(alike, blocks, chunk // self.block_size)
                else:
                    blocks = _run(alike, blocks, self._reach[self.windows.index(window)])
                longest = max(longest, blocks)
        tokens = blocks * self.block_size
        groups = [found[g][self._behind(g, tokens) : blocks] for g in range(len(self.windows))]
        r.junction = longest * self.block_size if longest > blocks else 0
        return Hits(tokens, groups)

    def fits(self, r: RequestState, hits: Hits, end: int, *, running: bool) -> bool:
        """Whether ``r`` may be admitted with ``hits`` to compute its tokens up to ``end``."""
        revived = sum(self._pool.unheld(blocks) for blocks in hits.groups)
        start, whole = hits.tokens, 0
        if self.whole:
            blocks = blocks_for(r.length, self.block_size)
            whole = self._in_whole(blocks, start // self.block_size)
            whole += self.beyond(r, start, r.length - start)
        needed = max(self.missing(hits, end) + self.beyond(r, start, end - start), whole)
        return needed + revived <= self.room(running=running)

    def share(self, r: RequestState, hits: Hits) -> None:
        """Let ``r``, which has no blocks, start from ``hits``."""
        r.registered = hits.tokens // self.block_size
        r.gone = [self._behind(g, hits.tokens) for g in range(len(self.windows))]
        for owner, blocks in zip(self._owners(r.id), hits.groups, strict=True):
            self._pool.share(owner, blocks)

    def let_go(self, r: RequestState, computed: int, in_flight: int) -> None:
        """Give back what no window reaches into any more, group by group."""
        tokens = computed - in_flight if self._processed else computed
        for g, owner in enumerate(self._owners(r.id)):
            self._let_go_of(r, g, owner, tokens)

    def take(self, r: RequestState, count: int, end: int) -> None:  # noqa: ARG002
        """Blocks for the tokens of ``r`` up to ``end``, group by group; they are free."""
        blocks = self._blocks_to(r, end)
        for g, owner in enumerate(self._owners(r.id)):
            self._take_for(r, g, owner, blocks)

    def register(self, r: RequestState, tokens: int) -> None:
        """Enter the blocks filled by the first ``tokens`` tokens of ``r`` into the prefix cache."""
        full = tokens // self.block_size
        if not self.cache or r.content is None or full <= r.registered:
            return
        self._keys.extend(r.keys, r.content, tokens)
        for g, owner in enumerate(self._owners(r.id)):
            for start, end in self._worth(r, g, full):
                self._register_of(r, g, owner, range(max(start, r.registered), min(end, full)))
        r.registered = full

    def release(self, r: RequestState, unused: int = 0) -> None:  # noqa: ARG002
        """Take the blocks of ``r`` back, group by group."""
        for group, owner in zip(self._kept, self._owners(r.id), strict=True):
            window = self._keyless_behind and not isinstance(group, str) and group > 0
            self._pool.release(owner, keyless_first=self._keyless_first or window)

    def blocks_of(self, request_id: int) -> list[int]:
        """The numbers of the blocks that a request holds now, group by group."""
        tables = (self._pool.tables.get(owner, ()) for owner in self._owners(request_id))
        return [block for table in tables for block in table]

    def fingerprint(self) -> Hashable:
        """What decides later allocations."""
        return super().fingerprint(), tuple(self._pool.holdings().items())

    @property
    def _pool(self) -> BlockPool:
        assert self.tables is not None
        return self.tables

    def _blocks_to(self, r: RequestState, end: int) -> int:  # noqa: ARG002
        """Blocks of tokens that a table of ``r`` has, which computes its tokens up to ``end``."""
        return blocks_for(end, self.block_size)

    def _in_all(self, each: int) -> int:
        """Blocks in all groups together, for so many blocks of tokens."""
        return each * len(self.windows)

    def _in_whole(self, blocks: int, hit: int) -> int:
        """Blocks that a sequence of so many has at most at a time, without the ``hit`` ones."""
        return sum(max(min(blocks, most) - hit, 0) for most in self._most)

    def _let_go_of(self, r: RequestState, g: int, owner: int, tokens: int) -> None:
        gone = r.gone
        if (behind := self._behind(g, tokens)) > gone[g]:
            count = min(behind - gone[g], self._pool.held(owner))
            self._pool.release_head(owner, count, keyless_first=self._keyless_behind)
            gone[g] += count

    def _take_for(self, r: RequestState, g: int, owner: int, blocks: int) -> None:
        """Let the table of a group reach to so many blocks."""
        self._pool.take(owner, max(blocks - r.gone[g] - self._pool.held(owner), 0))

    def _register_of(self, r: RequestState, g: int, owner: int, blocks: range) -> None:
        """Enter those of these blocks that the table of a group has."""
        gone, table = r.gone[g], self._pool.tables[owner]
        start, end = max(blocks.start, gone), blocks.stop
        if start < end:
            keys = self._keys_of(r, g, start, end)
            self._pool.register_all(table[start - gone : end - gone], keys)

    def _owners(self, request_id: int) -> range:
        """By group the owner of the request's table."""
        groups = len(self.windows)
        return range(request_id * groups, (request_id + 1) * groups)

    def _keys_of(self, r: RequestState, g: int, start: int, end: int) -> array[int]:
        groups = len(self.windows)
        return array("q", [key * groups + g for key in r.keys[start:end]])

    def _behind(self, g: int, tokens: int) -> int:
        """Blocks that the window or chunk of a group has left behind before the token after
        ``tokens``."""
        if chunk := self._chunks[g]:
            return tokens // chunk * (chunk // self.block_size)
        window = self.windows[g]
        return max(tokens - window + 1, 0) // self.block_size if window else 0

    def _worth(self, r: RequestState, g: int, full: int) -> list[tuple[int, int]]:
        """Ranges of blocks of a group that could serve a hit, while ``full`` are filled."""
        if not self.windows[g] or not self._boundaries:
            return [(0, full)]
        ends = {(r.prompt.prompt_tokens - 1) // self.block_size}
        ends.add(r.junction // self.block_size)
        return [(end - self._reach[g], end) for end in ends if end]


def _run(groups: list[array[int]], most: int, reach: int) -> int:
    """Blocks of the longest hit of at most ``most``: the last ``reach`` of them are in all groups.

    A shorter run at the very beginning is a hit, too, and with ``reach`` 0 nothing else is.
    """
    there = [all(blocks) for blocks in zip(*(group[:most] for group in groups), strict=True)]
    run = 0
    for end in range(len(there), 0, -1):
        run = run + 1 if there[end - 1] else 0
        if reach and run == reach:
            return end - 1 + reach
    return run


def _behind_last(groups: list[array[int]], most: int, chunk: int) -> int:
    """Blocks of the longest hit of at most ``most``, from the last multiple of ``chunk`` on."""
    blocks = most // chunk * chunk
    while blocks < most and all(group[blocks] for group in groups):
        blocks += 1
    return blocks
