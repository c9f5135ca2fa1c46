"""Prefix caching in TensorRT-LLM: the tree of reusable blocks.

Source: ``kvCacheManager.cpp`` and ``evictionPolicy.cpp`` of NVIDIA/TensorRT-LLM@b35ac1b64, the last
available copy before the modelled revision. The model has one attention window, one priority and no
host memory; ``enable_partial_reuse`` and ``copy_on_partial_reuse`` have their default values.
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
    """A block in the prefix tree. ``key`` contains its tokens.

    ``by_start`` groups the children by their first token. Within a group, the oldest child comes
    first.
    """

    # Only children with the same first token have a common prefix.

    __slots__ = ("block", "by_start", "children", "key", "parent")

    def __init__(self, block: int, key: Key, parent: ReusableBlock | None) -> None:
        self.block, self.key, self.parent = block, key, parent
        self.children: dict[Key, ReusableBlock] = {}
        self.by_start: dict[tuple[str, int], dict[Key, ReusableBlock]] = {}

    def adopt(self, child: ReusableBlock) -> None:
        """Add ``child`` to the children."""
        self.children[child.key] = child
        self.by_start.setdefault(child.key[0][:2], {})[child.key] = child

    def drop(self, child: ReusableBlock) -> None:
        """Remove ``child`` from the children."""
        del self.children[child.key]
        alike = self.by_start[child.key[0][:2]]
        del alike[child.key]
        if not alike:
            del self.by_start[child.key[0][:2]]


class ReusingKvCache(KvCache):
    """KV blocks that prompts with equal prefixes share.

    A free block stays in the prefix tree until it is allocated again. At that time, the block and
    all its descendants leave the tree.
    """

    # Free blocks are ordered by the time at which they became free. ``_last`` maps each block to
    # the request that last allocated it. When a request in ``_spoilt`` frees its blocks, they are
    # not cached.

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

    # ------------------------------------------------------------------ queries before a step

    def waits(self, r: LlmRequest, coming: set[Hashable]) -> bool:
        """Return whether another request is computing the first block that ``r`` lacks.

        ``coming`` contains the blocks that are being computed. If the block is not among them, it
        is added. Source: ``_one_manager_beneficial_to_skip``.
        """
        new = self._first_new(r) if r.first_chunk else None
        if new is None or new in coming:
            return new is not None
        coming.add(new)
        return False

    def coming(self, active: Sequence[LlmRequest]) -> set[Hashable]:
        """Return the first uncached block of each partly computed prompt."""
        parts = (r for r in active if r.state == "context" and not r.first_chunk)
        return {new for r in parts if (new := self._first_new(r)) is not None}

    def freed(self, victims: Sequence[LlmRequest]) -> int:
        """Return the number of blocks that only the requests ``victims`` hold."""
        tables, lose = self.pool.tables, {r.id for r in victims}
        stay = set(chain.from_iterable(table for i, table in tables.items() if i not in lose))
        return len(set(chain.from_iterable(tables[i] for i in lose)) - stay)

    def _first_new(self, r: LlmRequest) -> Hashable | None:
        """Return the first full block of ``r`` that is not cached, or None
        (``findNewContextBlock``).
        """
        node = self._root
        for key in self._full(r, r.known):
            if key not in node.children:
                return node.block, key
            node = node.children[key]
        return None

    # ------------------------------------------------------------------ changes by a step

    def take(self, r: LlmRequest, count: int) -> None:
        """Allocate ``count`` blocks to ``r``."""
        # An allocated block may have last belonged to a request that lost it in a pause and now
        # holds other blocks. The blocks of that request are then not cached when the request frees
        # them.
        for block in self.pool.take(r.id, count):
            if block in self._kept:
                self._drop(self._kept[block])
            before = self._last.get(block, r.id)
            if before != r.id and self.pool.held(before):
                self._spoilt.add(before)
            self._last[block] = r.id

    def enter(self, r: LlmRequest) -> int:
        """Allocate all blocks of a prompt and return the number of cached prompt tokens.

        The last token is always computed. Source: ``loadOrAllocateBlocks``.
        """
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
        """Cache all full blocks of a prompt after a chunk was computed.

        The last token is excluded. Source: ``storeContextBlocks``.
        """
        self._keep(r, self._full(r, r.known - 1))

    def release(self, r: LlmRequest) -> None:
        """Free the blocks of ``r`` and cache their contents, including a partial last block."""
        if self.pool.held(r.id) and r.id not in self._spoilt:
            self._keep(r, self._pieces(r, r.known - 1))
        self.pool.release(r.id)
        self._spoilt.discard(r.id)

    def fingerprint(self) -> Hashable:
        """Return the state that determines later allocations."""
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
        """Return the child whose tokens match the most leading tokens of ``key``.

        Also returns the number of matching tokens.
        """
        # If several children are equal in this respect, the result is the last stored one, which
        # ``std::unordered_map`` usually visits first.
        if key in node.children:
            return node.children[key], _length(key)
        best, most = None, 0
        for child in reversed(node.by_start.get(key[0][:2], {}).values()):
            if (tokens := _alike(child.key, key)) > most:
                best, most = child, tokens
        return best, most

    def _part(self, r: LlmRequest, kept: ReusableBlock) -> None:
        """Start a block of ``r`` from the matching first tokens of the cached block ``kept``."""
        # If the cached block is an unused leaf, ``r`` takes it over; otherwise its content is
        # copied to a new block.
        if kept.children or not self.pool.is_free(kept.block):
            self.take(r, 1)
            return
        self._drop(kept)
        self.pool.share(r.id, [kept.block])

    def _keep(self, r: LlmRequest, keys: Sequence[Key]) -> None:
        """Insert the blocks of ``r`` that are missing in the tree (``storeBlocks``)."""
        node = self._root
        for block, key in zip(self.pool.tables[r.id], keys, strict=False):
            if key not in node.children:
                self._kept[block] = ReusableBlock(block, key, node)
                node.adopt(self._kept[block])
            node = node.children[key]

    def _drop(self, kept: ReusableBlock) -> None:
        """Remove a block and its descendants from the tree."""
        # Requests that hold these blocks keep them.
        assert kept.parent is not None
        kept.parent.drop(kept)
        gone = [kept]
        for one in gone:
            del self._kept[one.block]
            gone.extend(one.children.values())

    def _full(self, r: LlmRequest, tokens: int) -> list[Key]:
        """Return the keys of the full blocks in the first ``tokens`` tokens of ``r``."""
        keys, size, count = self._keys[r.id], self.tokens_per_block, tokens // self.tokens_per_block
        for at in range(len(keys), count):
            keys.append(self._contents[r.id].slices(at * size, (at + 1) * size))
        return keys[:count]

    def _pieces(self, r: LlmRequest, tokens: int) -> list[Key]:
        """Return the keys of the blocks in the first ``tokens`` tokens of ``r``.

        A partial last block is included.
        """
        rest = tokens % self.tokens_per_block
        last = [self._contents[r.id].slices(tokens - rest, tokens)] if rest else []
        return self._full(r, tokens) + last


def _length(key: Key) -> int:
    return sum(piece.end - piece.start for piece in key)


def _alike(one: Key, other: Key) -> int:
    """Return the length in tokens of the common prefix of two keys."""
    tokens = 0
    for a, b in zip(one, other, strict=False):
        if a[:2] != b[:2]:
            break
        tokens += min(a.end, b.end) - a.start
        if a != b:
            break
    return tokens
