"""Blocks that are kept for prompts that begin alike: TensorRT-LLM's tree of blocks.

Read at NVIDIA/TensorRT-LLM@b35ac1b64 (``kvCacheManager.cpp``, ``evictionPolicy.cpp``), the stored
copy next before the revision that decides: one window of attention, one priority, no host memory,
``enable_partial_reuse`` and ``copy_on_partial_reuse`` as they are by default.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import chain

from simkv.core.block_keys import TokenContent
from simkv.core.block_pool import BlockPool
from simkv.core.request import Prompt, Segment
from simkv.core.scheduler_protocol import blocks_for
from simkv.schedulers.trtllm.llm_request import LlmRequest
from simkv.schedulers.trtllm.memory import KvCache

Key = tuple[Segment, ...]


class ReusableBlock:
    """A block in the tree: ``key`` are its tokens, its ancestors hold those before them."""

    __slots__ = ("block", "children", "key", "parent")

    def __init__(self, block: int, key: Key, parent: ReusableBlock | None) -> None:
        self.block, self.key, self.parent = block, key, parent
        self.children: dict[Key, ReusableBlock] = {}


class ReusingKvCache(KvCache):
    """Blocks of KV, of which those that prompts share are shared.

    Free blocks stand in the order in which they became free and keep their place in the tree until
    they are taken for something else, when all below them leave it too. ``_last`` is by block whom
    it was handed out to last, and ``_spoilt`` are requests of which nothing is kept.
    """

    def __init__(self, num_blocks: int, tokens_per_block: int) -> None:
        super().__init__(num_blocks, tokens_per_block)
        self.pool = BlockPool(num_blocks)
        self._root = ReusableBlock(0, (), None)
        self._kept: dict[int, ReusableBlock] = {}
        self._contents: dict[int, TokenContent] = {}
        self._keys: dict[int, list[Key]] = {}
        self._last: dict[int, int] = {}
        self._spoilt: set[int] = set()

    def hear(self, prompt: Prompt) -> None:
        self._contents[prompt.id] = TokenContent(prompt)
        self._keys[prompt.id] = []

    def forget(self, request_id: int) -> None:
        del self._contents[request_id], self._keys[request_id]

    # ------------------------------------------------------------------ asked before a step

    def waits(self, r: LlmRequest, coming: set[Hashable]) -> bool:
        """Whether the first block that ``r`` would have to compute is among those ``coming``; if
        not, it is from now on (``_one_manager_beneficial_to_skip``)."""
        new = self._first_new(r) if r.first_chunk else None
        if new is None or new in coming:
            return new is not None
        coming.add(new)
        return False

    def coming(self, active: Sequence[LlmRequest]) -> set[Hashable]:
        """The first new blocks of prompts that are computed in part."""
        parts = (r for r in active if r.state == "context" and not r.first_chunk)
        return {new for r in parts if (new := self._first_new(r)) is not None}

    def freed(self, victims: Sequence[LlmRequest]) -> int:
        """Blocks that nobody but these holds."""
        tables, lose = self.pool.tables, {r.id for r in victims}
        stay = set(chain.from_iterable(table for i, table in tables.items() if i not in lose))
        return len(set(chain.from_iterable(tables[i] for i in lose)) - stay)

    def _first_new(self, r: LlmRequest) -> Hashable | None:
        """Of all full blocks of its tokens the first that is not kept (``findNewContextBlock``)."""
        node = self._root
        for key in self._full(r, r.known):
            if key not in node.children:
                return node.block, key
            node = node.children[key]
        return None

    # ------------------------------------------------------------------ what a step does

    def take(self, r: LlmRequest, count: int) -> None:
        """Hand out blocks. Whatever else is left in the engine of a request that had one of them
        before a pause is not kept any more."""
        for block in self.pool.take(r.id, count):
            if block in self._kept:
                self._drop(self._kept[block])
            before = self._last.get(block, r.id)
            if before != r.id and self.pool.held(before):
                self._spoilt.add(before)
            self._last[block] = r.id

    def enter(self, r: LlmRequest) -> int:
        """Blocks for a prompt, all of them; of how many of its tokens there is KV
        (``loadOrAllocateBlocks``). Its last token is always computed."""
        found, node = 0, self._root
        for key in self._pieces(r, r.prompt - 1):
            kept, tokens = self._best(node, key)
            if kept is None:
                break
            found += tokens
            if kept.key != key or tokens < self.tokens_per_block:
                self._part(r, kept)
                break
            self.pool.share(r.id, [kept.block])
            node = kept
        self.take(r, blocks_for(r.prompt, self.tokens_per_block) - self.pool.held(r.id))
        return found

    def store(self, r: LlmRequest) -> None:
        """A part of its prompt is computed: keep full blocks of all of it, but for the last token
        that is known (``storeContextBlocks``)."""
        self._keep(r, self._full(r, r.known - 1))

    def release(self, r: LlmRequest) -> None:
        """Give its blocks back and keep what they hold, the last one too if it is not full."""
        if self.pool.held(r.id) and r.id not in self._spoilt:
            self._keep(r, self._pieces(r, r.known - 1))
        self.pool.release(r.id)
        self._spoilt.discard(r.id)

    def fingerprint(self) -> Hashable:
        """What decides later allocations."""
        kept = [(n.block, n.key, n.parent and n.parent.block) for n in self._kept.values()]
        tables = sorted((i, tuple(table)) for i, table in self.pool.tables.items())
        last = sorted(self._last.items())
        return (
            self.pool.free_order(),
            tuple(sorted(kept)),
            tuple(tables),
            tuple(last),
            frozenset(self._spoilt),
        )

    # ------------------------------------------------------------------ the tree

    def _best(self, node: ReusableBlock, key: Key) -> tuple[ReusableBlock | None, int]:
        """The block below ``node`` that begins most like ``key``, and how many tokens that is.

        Of several the one kept last, as ``std::unordered_map`` mostly goes.
        """
        if key in node.children:
            return node.children[key], _length(key)
        best, most = None, 0
        for child in reversed(node.children.values()):
            if (tokens := _alike(child.key, key)) > most:
                best, most = child, tokens
        return best, most

    def _part(self, r: LlmRequest, kept: ReusableBlock) -> None:
        """Begin a block of its own with what another holds: that one if nobody needs it, or a
        copy."""
        if kept.children or not self.pool.is_free(kept.block):
            self.take(r, 1)
            return
        self._drop(kept)
        self.pool.share(r.id, [kept.block])

    def _keep(self, r: LlmRequest, keys: Sequence[Key]) -> None:
        """Put the blocks of ``r`` into the tree, from the first new one (``storeBlocks``)."""
        node = self._root
        for block, key in zip(self.pool.tables[r.id], keys, strict=False):
            if key not in node.children:
                self._kept[block] = node.children[key] = ReusableBlock(block, key, node)
            node = node.children[key]

    def _drop(self, kept: ReusableBlock) -> None:
        """Take a block and all below it out of the tree; who holds one of them still does."""
        assert kept.parent is not None
        del kept.parent.children[kept.key]
        gone = [kept]
        for one in gone:
            del self._kept[one.block]
            gone.extend(one.children.values())

    def _full(self, r: LlmRequest, tokens: int) -> list[Key]:
        """The full blocks of its first ``tokens`` tokens."""
        keys, size, count = self._keys[r.id], self.tokens_per_block, tokens // self.tokens_per_block
        for at in range(len(keys), count):
            keys.append(self._contents[r.id].slices(at * size, (at + 1) * size))
        return keys[:count]

    def _pieces(self, r: LlmRequest, tokens: int) -> list[Key]:
        """Its first ``tokens`` tokens in blocks, of which the last may not be full."""
        rest = tokens % self.tokens_per_block
        last = [self._contents[r.id].slices(tokens - rest, tokens)] if rest else []
        return self._full(r, tokens) + last


def _length(key: Key) -> int:
    return sum(piece.end - piece.start for piece in key)


def _alike(one: Key, other: Key) -> int:
    """Tokens from the start that are the same in both."""
    tokens = 0
    for a, b in zip(one, other, strict=False):
        if a[:2] != b[:2]:
            break
        tokens += min(a.end, b.end) - a.start
        if a != b:
            break
    return tokens
