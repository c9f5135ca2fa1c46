# mypyc: compile
"""KV blocks of vLLM's requests: required, held and cached blocks.

The counterpart of ``vllm/v1/core/kv_cache_manager.py``: the scheduler decides token counts and asks
this module whether there are enough blocks. All counts are in blocks unless named tokens.
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
    """Cached blocks that a request can reuse, by layer group, and the number of ``tokens`` they
    cover."""

    tokens: int
    groups: list[array[int]]


NO_HITS = CacheHits(0, [NO_BLOCKS])


@mypyc_attr(allow_interpreted_subclasses=True, serializable=True)
class VllmMemory:
    """Block memory of a model whose layers all attend to all tokens.

    ``whole``: the whole sequence of a request must fit at admission; else its first chunk. An
    admission leaves ``watermark`` blocks free. ``cache`` is the pool if prefix caching is on.
    ``tables`` is the pool if blocks have ids; else they are only counted. ``frees_while_running``:
    running requests free blocks. ``aheads`` lists the numbers of tokens before a block is full at
    which a step does more to a decoding request than add a token.
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
        self._keyless_first = rules.reuses_uncached_first
        self.frees_while_running = False
        self.aheads: tuple[int, ...] = (0, 1) if cached else (0,)
        self._keys = BlockKeys(config.block_size)

    def begin(self) -> None:
        """Begin a step."""

    def content(self, prompt: Prompt) -> TokenContent | None:
        """Return the identity of a prompt's tokens if prefix caching is on, else None."""
        return TokenContent(prompt) if self.cache else None

    def held(self, tokens: int) -> int:
        """Return the blocks that a running request with this number of computed tokens holds."""
        return blocks_for(tokens, self.block_size)

    def blocks_held_by(self, r: RequestState, computed: int) -> int:  # noqa: ARG002
        """Return the blocks of the running request ``r`` with this number of computed tokens."""
        return self.held(computed)

    def missing(self, hits: CacheHits, end: int) -> int:
        """Return the blocks to allocate for the tokens up to ``end`` of a request that reuses
        ``hits``."""
        return blocks_for(end, self.block_size) - len(hits.groups[0])

    def blocks_to_grow(self, computed: int, n: int) -> int:
        """Return the additional blocks for ``n`` tokens after ``computed`` ones."""
        size = self.block_size
        return blocks_for(computed + n, size) - blocks_for(computed, size)

    def beyond(self, r: RequestState, start: int, n: int) -> int:  # noqa: ARG002
        """Return the additional blocks of ``r`` beyond the blocks that ``n`` tokens after ``start``
        fill."""
        return 0

    def room(self, *, running: bool) -> int:
        """Return the free blocks available to an admission; the watermark applies if requests
        run."""
        return self.pool.free - (self.watermark if running else 0)

    def hits(self, r: RequestState) -> CacheHits:
        """Return the cached blocks that ``r`` can reuse; at least its last token stays to be
        computed."""
        if not self.cache or r.content is None or r.computed:
            return NO_HITS
        blocks = (r.length - 1) // self.block_size
        self.name(r, blocks * self.block_size)
        found = self.cache.lookup(r.keys[:blocks])
        return CacheHits(len(found) * self.block_size, [found])

    def name(self, r: RequestState, tokens: int) -> None:
        """Compute the keys of the full blocks in the first ``tokens`` tokens of ``r``."""
        if r.content is not None:
            self._keys.extend(r.keys, r.content, tokens)

    def fits(self, r: RequestState, hits: CacheHits, end: int, *, running: bool) -> bool:
        """Return whether ``r`` can be admitted with ``hits`` to compute its tokens up to
        ``end``."""
        end = r.length if self.whole else end
        revived = self.cache.count_unreferenced(hits.groups[0]) if self.cache else 0
        return self.missing(hits, end) + revived <= self.room(running=running)

    def has_unready_hits(self, r: RequestState, hits: CacheHits) -> bool:  # noqa: ARG002
        """Return whether ``hits`` are written in this step and therefore usable only from the
        next."""
        return False

    def share(self, r: RequestState, hits: CacheHits) -> None:
        """Add ``hits`` to the empty block table of ``r``."""
        if self.cache:
            self.cache.share(r.id, hits.groups[0])
        r.registered = len(hits.groups[0])

    def free_unneeded(self, r: RequestState, computed: int, in_flight: int) -> None:
        """Free blocks that the running request ``r`` no longer needs; none with full attention."""

    def take(self, r: RequestState, count: int, end: int) -> None:  # noqa: ARG002
        """Allocate ``count`` free blocks for the tokens of ``r`` up to ``end``."""
        if count:
            self.pool.take(r.id, count)

    def register(self, r: RequestState, tokens: int) -> None:
        """Register the blocks filled by the first ``tokens`` tokens of ``r`` in the prefix
        cache."""
        full = tokens // self.block_size
        if not self.cache or r.content is None or full <= r.registered:
            return
        self.name(r, tokens)
        table, known = self.cache.tables[r.id], r.registered
        if full == known + 1:  # the usual case of a decode
            self.cache.register(table[known], r.keys[known])
        else:
            self.cache.register_all(table[known:full], r.keys[known:full])
        r.registered = full

    def release(self, r: RequestState, unused: int = 0) -> None:
        """Free the blocks of ``r``, including ``unused`` ones; it is in no group."""
        if isinstance(self.pool, BlockPool):
            self.pool.release(r.id, keyless_first=self._keyless_first)
        else:
            self.pool.return_blocks(self.held(r.computed) + unused)

    def blocks_of(self, request_id: int) -> list[int]:
        """Return the ids of the blocks that a request holds, if blocks have ids."""
        return self.tables.tables.get(request_id, NO_BLOCKS).tolist() if self.tables else []

    def fingerprint(self) -> Hashable:
        """Return the state that determines later allocations."""
        return self.pool.fingerprint()
