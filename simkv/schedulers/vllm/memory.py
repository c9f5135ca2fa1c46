"""The blocks of vLLM's requests: how many one needs, which it has, what others left in the cache.

It is to the scheduler what ``vllm/v1/core/kv_cache_manager.py`` is to vLLM's: the scheduler says
who is to have how many tokens, and asks here whether there is room. All counts are in blocks
unless they are called tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable
from typing import NamedTuple

from mypy_extensions import mypyc_attr

from simkv.core.block_keys import BlockKeys, TokenContent
from simkv.core.block_pool import NO_BLOCKS, BlockCounter, BlockPool
from simkv.core.request import Prompt
from simkv.core.scheduler_protocol import blocks_for
from simkv.schedulers.vllm.config import VllmConfig
from simkv.schedulers.vllm.release_rules import VllmRules
from simkv.schedulers.vllm.request_state import RequestState


class CacheHits(NamedTuple):
    """Cached blocks that a request can start from, by group of layers, and where they end."""

    tokens: int
    groups: list[array[int]]


NO_HITS = CacheHits(0, [NO_BLOCKS])


@mypyc_attr(allow_interpreted_subclasses=True, serializable=True)
class VllmMemory:
    """One kind of blocks for all layers, as a model has it whose layers attend to everything.

    ``whole``: a request is admitted only if its whole sequence fits; else its first chunk must.
    An admission leaves ``watermark`` blocks free. ``cache`` is the pool if blocks are shared,
    ``tables`` if they have numbers at all; else they are only counted. ``recycles``: running
    requests give blocks back. ``aheads``: so many steps before its blocks are full, something else
    than a token may become of a request that decodes.
    """

    def __init__(self, config: VllmConfig, rules: VllmRules, *, tables: bool) -> None:
        usable = config.num_gpu_blocks - 1
        cached, whole = config.caches(rules), config.scheduler_reserve_full_isl
        self.cache = BlockPool(usable) if cached else None
        self.tables = self.cache or (BlockPool(usable) if tables else None)
        self.pool = self.tables or BlockCounter(usable)
        self.block_size = config.block_size
        self.whole = rules.scheduler_reserve_full_isl if whole is None else whole
        self.watermark = int(config.watermark * config.num_gpu_blocks)
        self._keyless_first = rules.keyless_first
        self.frees_while_running = False
        self.aheads: tuple[int, ...] = (0, 1) if cached else (0,)
        self._keys = BlockKeys(config.block_size)

    def begin(self) -> None:
        """A step begins."""

    def content(self, prompt: Prompt) -> TokenContent | None:
        """What identifies the tokens of a prompt, where blocks are shared."""
        return TokenContent(prompt) if self.cache else None

    def held(self, tokens: int) -> int:
        """Blocks of a running request with so many computed tokens: just those that they need."""
        return blocks_for(tokens, self.block_size)

    def blocks_held_by(self, r: RequestState, computed: int) -> int:  # noqa: ARG002
        """Blocks of ``r`` that runs, with so many computed tokens."""
        return self.held(computed)

    def missing(self, hits: CacheHits, end: int) -> int:
        """Blocks for the tokens up to ``end`` of a request that starts from ``hits``."""
        return blocks_for(end, self.block_size) - len(hits.groups[0])

    def blocks_to_grow(self, computed: int, n: int) -> int:
        """Blocks more for ``n`` tokens behind ``computed`` ones."""
        size = self.block_size
        return blocks_for(computed + n, size) - blocks_for(computed, size)

    def beyond(self, r: RequestState, start: int, n: int) -> int:  # noqa: ARG002
        """Blocks beyond those that ``n`` tokens of ``r`` behind ``start`` fill; it is to run."""
        return 0

    def room(self, *, running: bool) -> int:
        """Free blocks that an admission may take, while others are ``running`` or not."""
        return self.pool.free - (self.watermark if running else 0)

    def hits(self, r: RequestState) -> CacheHits:
        """What ``r`` can start from; at least its last token is left to compute."""
        if not self.cache or r.content is None or r.computed:
            return NO_HITS
        blocks = (r.length - 1) // self.block_size
        self.name(r, blocks * self.block_size)
        found = self.cache.lookup(r.keys[:blocks])
        return CacheHits(len(found) * self.block_size, [found])

    def name(self, r: RequestState, tokens: int) -> None:
        """Give the blocks of the first ``tokens`` tokens of ``r`` their keys, as far as full."""
        if r.content is not None:
            self._keys.extend(r.keys, r.content, tokens)

    def fits(self, r: RequestState, hits: CacheHits, end: int, *, running: bool) -> bool:
        """Whether ``r`` may be admitted with ``hits`` to compute its tokens up to ``end``."""
        end = r.length if self.whole else end
        revived = self.cache.count_unreferenced(hits.groups[0]) if self.cache else 0
        return self.missing(hits, end) + revived <= self.room(running=running)

    def has_unready_hits(self, r: RequestState, hits: CacheHits) -> bool:  # noqa: ARG002
        """Whether ``hits`` are of this very step: nobody can start from them before the next."""
        return False

    def share(self, r: RequestState, hits: CacheHits) -> None:
        """Let ``r``, which has no blocks, start from ``hits``."""
        if self.cache:
            self.cache.share(r.id, hits.groups[0])
        r.registered = len(hits.groups[0])

    def free_unneeded(self, r: RequestState, computed: int, in_flight: int) -> None:
        """Give back what ``r``, which runs, needs no more; nothing where all layers see all."""

    def take(self, r: RequestState, count: int, end: int) -> None:  # noqa: ARG002
        """``count`` blocks more for ``r``, for its tokens up to ``end``; they are free."""
        if count:
            self.pool.take(r.id, count)

    def register(self, r: RequestState, tokens: int) -> None:
        """Enter the blocks filled by the first ``tokens`` tokens of ``r`` into the prefix cache."""
        full = tokens // self.block_size
        if not self.cache or r.content is None or full <= r.registered:
            return
        self.name(r, tokens)
        table, known = self.cache.tables[r.id], r.registered
        if full == known + 1:  # as a decode does
            self.cache.register(table[known], r.keys[known])
        else:
            self.cache.register_all(table[known:full], r.keys[known:full])
        r.registered = full

    def release(self, r: RequestState, unused: int = 0) -> None:
        """Take the blocks of ``r`` back, ``unused`` ones too; it is in no group."""
        if isinstance(self.pool, BlockPool):
            self.pool.release(r.id, keyless_first=self._keyless_first)
        else:
            self.pool.return_blocks(self.held(r.computed) + unused)

    def blocks_of(self, request_id: int) -> list[int]:
        """The numbers of the blocks that a request holds now, where they have any."""
        return self.tables.tables.get(request_id, NO_BLOCKS).tolist() if self.tables else []

    def fingerprint(self) -> Hashable:
        """What decides later allocations."""
        return self.pool.fingerprint()
