# mypyc: compile
"""KV blocks of vLLM's requests and the prefix cache, for models with full attention.

This module corresponds to ``vllm/v1/core/kv_cache_manager.py``: the scheduler decides token counts,
and this module reports whether enough blocks are free. Counts are in blocks unless their name
contains ``tokens``.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable
from typing import NamedTuple

from mypy_extensions import mypyc_attr

from simkv.core.block_keys import KEYS_PER_RUN, BlockKeys, TokenContent
from simkv.core.block_pool import NO_BLOCKS, BlockCounter, BlockPool
from simkv.core.block_retention import RetentionPool
from simkv.core.request import Prompt
from simkv.core.scheduler_protocol import blocks_for
from simkv.schedulers.vllm.config import VllmConfig
from simkv.schedulers.vllm.release_rules import VllmRules
from simkv.schedulers.vllm.request_state import RequestState


class CacheHits(NamedTuple):
    """Cached blocks that a request can reuse.

    ``tokens`` is the number of tokens in the blocks. ``groups`` are the block ids of each layer
    group.
    """

    tokens: int
    groups: list[array[int]]


NO_HITS = CacheHits(0, [NO_BLOCKS])


@mypyc_attr(allow_interpreted_subclasses=True, serializable=True)
class VllmMemory:
    """KV blocks of a model in which all layers attend to all tokens.

    - ``pool``: all blocks.
    - ``cache``: the pool if prefix caching is on, else None.
    - ``tables``: the pool if blocks have ids, else None.
    - ``whole``: whether all tokens of a request must fit at admission, not only its first chunk.
    - ``watermark``: number of blocks that stay free at admission.
    - ``frees_while_running``: whether running requests free blocks.
    - ``fills_at_once``: whether `DecodeGroup.skip` may allocate the blocks of many steps at once.
    - ``aheads``: positions at which a decode changes the blocks of its request. A position is a
      number of tokens before the end of a block.
    """

    def __init__(self, config: VllmConfig, rules: VllmRules, *, tables: bool) -> None:
        usable = config.num_gpu_blocks - 1
        cached, whole = config.caches(rules), config.scheduler_reserve_full_isl
        build_pool = RetentionPool if config.retains else BlockPool
        self.cache = build_pool(usable) if cached else None
        self.tables = self.cache or (BlockPool(usable) if tables else None)
        self.pool = self.tables or BlockCounter(usable)
        self.block_size = config.block_size
        self.whole = rules.scheduler_reserve_full_isl if whole is None else whole
        self.watermark = int(config.watermark * config.num_gpu_blocks)
        self._keyless_first = rules.reuses_uncached_first
        self.frees_while_running = False
        self.fills_at_once = cached
        self.aheads: tuple[int, ...] = (0, 1) if cached else (0,)
        self._keys = BlockKeys(config.block_size)

    def begin(self) -> None:
        """Discard the state of the previous step."""
        # Only subclasses have such a state.

    def content(self, prompt: Prompt) -> TokenContent | None:
        """Return the identity of a prompt's tokens, or None if prefix caching is off."""
        return TokenContent(prompt) if self.cache else None

    def held(self, tokens: int) -> int:
        """Return the number of blocks of a running request.

        ``tokens`` is the number of its computed tokens.
        """
        return blocks_for(tokens, self.block_size)

    def blocks_held_by(self, r: RequestState, computed: int) -> int:  # noqa: ARG002
        """Return the number of blocks of ``r`` when its first ``computed`` tokens are computed."""
        return self.held(computed)

    def missing(self, hits: CacheHits, end: int) -> int:
        """Return the number of new blocks for the first ``end`` tokens of a waiting request.

        The cached blocks ``hits`` are not counted.
        """
        return blocks_for(end, self.block_size) - len(hits.groups[0])

    def blocks_to_grow(self, computed: int, n: int) -> int:
        """Return the number of new blocks for ``n`` tokens after ``computed`` tokens."""
        size = self.block_size
        return blocks_for(computed + n, size) - blocks_for(computed, size)

    def beyond(self, r: RequestState, start: int, n: int) -> int:  # noqa: ARG002
        """Return the number of blocks for draft tokens and recurrent states.

        These blocks are needed in addition to ``blocks_to_grow``.
        """
        # The blocks are needed in addition to ``blocks_to_grow(start, n)``. There are none in this
        # class.
        return 0

    def room(self, *, running: bool) -> int:
        """Return the number of blocks that an admission can use.

        If other requests are ``running``, the watermark must stay free.
        """
        return self.pool.free - (self.watermark if running else 0)

    def hits(self, r: RequestState) -> CacheHits:
        """Return the cached blocks that ``r`` can reuse.

        The last token is never reused, because a step must compute at least one token.
        """
        if not self.cache or r.content is None or r.computed:
            return NO_HITS
        blocks = (r.length - 1) // self.block_size
        self.name(r, blocks * self.block_size)
        found = self.cache.lookup(r.keys[:blocks])
        return CacheHits(len(found) * self.block_size, [found])

    def name(self, r: RequestState, tokens: int) -> None:
        """Compute the cache keys of the full blocks in the first ``tokens`` tokens of ``r``."""
        if r.content is not None:
            self._keys.extend(r.keys, r.content, tokens)

    def new_runs(self, r: RequestState, blocks: int) -> list[int]:
        """Return the indices of blocks that may start a new series of consecutive cache keys.

        Only the first ``blocks`` blocks of ``r`` are considered.
        """
        # The result contains only indices below ``blocks`` of blocks that have no key yet.
        assert r.content is not None
        first = len(r.keys) + self._keys.run_left(r.keys, r.content)
        return [i for i in range(first, blocks) if (i - first) % KEYS_PER_RUN < 2]

    def fits(self, r: RequestState, hits: CacheHits, end: int, *, running: bool) -> bool:
        """Return whether enough blocks are free to admit ``r`` with its first ``end`` tokens.

        ``r`` reuses the cached blocks ``hits``. ``running`` is true if other requests run.
        """
        end = r.length if self.whole else end
        revived = self.cache.count_unreferenced(hits.groups[0]) if self.cache else 0
        return self.missing(hits, end) + revived <= self.room(running=running)

    def has_unready_hits(self, r: RequestState, hits: CacheHits) -> bool:  # noqa: ARG002
        """Return whether the current step is still writing one of the blocks ``hits``."""
        # Such blocks can be reused from the next step on. Only recurrent states have this
        # restriction.
        return False

    def share(self, r: RequestState, hits: CacheHits) -> None:
        """Add the cached blocks ``hits`` to the empty block table of ``r``."""
        if self.cache:
            self.cache.share(r.id, hits.groups[0])
        r.registered = len(hits.groups[0])

    def free_unneeded(self, r: RequestState, computed: int, in_flight: int) -> None:
        """Free blocks of ``r`` that no later token attends to."""
        # Does nothing here, because with full attention every token attends to all earlier tokens.

    def take(self, r: RequestState, count: int, end: int) -> None:  # noqa: ARG002
        """Allocate ``count`` free blocks for the first ``end`` tokens of ``r``."""
        if count:
            self.pool.take(r.id, count)

    def register(self, r: RequestState, tokens: int) -> None:
        """Add to the prefix cache the blocks that the first ``tokens`` tokens of ``r`` fill."""
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
        """Free all blocks of ``r``.

        ``unused`` is the number of blocks that were allocated for tokens that were not computed.
        """
        # ``r`` must not be a member of the decode group.
        if isinstance(self.pool, BlockPool):
            self.pool.release(r.id, keyless_first=self._keyless_first)
        else:
            self.pool.return_blocks(self.held(r.computed) + unused)

    def blocks_of(self, request_id: int) -> list[int]:
        """Return the ids of the blocks of a request. The list is empty if blocks have no ids."""
        return self.tables.tables.get(request_id, NO_BLOCKS).tolist() if self.tables else []

    def fingerprint(self) -> Hashable:
        """Return the state that determines later allocations."""
        return self.pool.fingerprint()
