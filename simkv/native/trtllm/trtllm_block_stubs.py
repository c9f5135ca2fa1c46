"""Stub of TensorRT-LLM's block manager with block reuse, independent of simkv's scheduler.

It follows ``WindowBlockManager``, ``KVCacheBlock`` and ``LRUEvictionPolicy`` of
NVIDIA/TensorRT-LLM@b35ac1b64 method by method, with linked blocks and single tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from simkv.native.trtllm.trtllm_stubs import KvCacheStub, LlmRequestStub, StreamToken

BlockKey = tuple[StreamToken, ...]


class BlockMatch(NamedTuple):
    """The result of ``findMatchingBlock``."""

    partial: bool = False
    tokens: int = 0
    block: BlockStub | None = None


class BlockStub:
    """A KV block; ``prev`` is its parent in the tree of reusable blocks."""

    def __init__(self) -> None:
        self.refs = self.scheduling_refs = 0
        self.key: BlockKey = ()
        self.is_full = False
        self.prev: BlockStub | None = None
        self.next: dict[BlockKey, BlockStub] = {}

    def find_matching_block(self, key: BlockKey, *, partial: bool) -> BlockMatch:
        if not key or not self.next:
            return BlockMatch()
        if key in self.next:
            block = self.next[key]
            return BlockMatch(not block.is_full, len(key), block)
        best = BlockMatch()
        for known, block in reversed(self.next.items()) if partial else ():
            matched = 0
            while matched < min(len(known), len(key)) and known[matched] == key[matched]:
                matched += 1
            if matched > best.tokens:
                best = BlockMatch(partial=True, tokens=matched, block=block)
        return best

    def free_leaf_block(self) -> None:
        assert not self.next
        if self.prev is not None:
            del self.prev.next[self.key]
            self.prev = None

    def free_with_children(self) -> None:
        for child in list(self.next.values()):
            child.free_with_children()
        self.free_leaf_block()


class ReusingKvCacheStub(KvCacheStub):
    """A ``KvCacheStub`` that keeps blocks for reuse after the end of their request."""

    enable_block_reuse = True

    def __init__(self, blocks: int, tokens_per_block: int, window: int) -> None:
        super().__init__(blocks, tokens_per_block, window)
        self.root = BlockStub()
        self.free_queue = deque(BlockStub() for _ in range(blocks))
        self.allocated: dict[int, list[BlockStub]] = {}
        self.block_to_sequence: dict[BlockStub, int] = {}
        self.valid_for_store: dict[int, bool] = {}

    def start_scheduling(self) -> None:
        super().start_scheduling()
        for blocks in self.allocated.values():
            for block in blocks:
                block.scheduling_refs = block.refs

    def scheduling_remove_sequence(self, request_id: int) -> None:
        for block in self.allocated[request_id]:
            block.scheduling_refs -= 1
            self._scheduling_free += block.scheduling_refs == 0

    def find_new_context_block(
        self, unique_tokens: Sequence[StreamToken], _: LlmRequestStub
    ) -> BlockKey | None:
        found: BlockKey = ()
        node = self.root
        for key in self._chop(unique_tokens, len(unique_tokens), partial=False):
            found += key
            block = node.find_matching_block(key, partial=False).block
            if block is None:
                return found
            node = block
        return None

    def add_sequence(self, r: LlmRequestStub) -> None:
        i, length = r.request_id, r.prompt_len
        self.tokens[i], self.held[i], self.allocated[i] = length, 0, []
        self.valid_for_store[i] = True
        keys = self._chop(r.get_unique_tokens(0), length - 1, partial=True)
        keys += [()] * (self._blocks(length) - len(keys))
        r.set_prepopulated_prompt_len(self._load_or_allocate(i, keys), self.size)

    def store_context_blocks(self, r: LlmRequestStub) -> None:
        if r.request_id in self.allocated:
            self._store(r, partial=False)

    def remove_sequence(self, r: LlmRequestStub) -> None:
        i = r.request_id
        if i not in self.allocated:
            return
        if self.valid_for_store.pop(i):
            self._store(r, partial=True)
        for block in reversed(self.allocated.pop(i)):
            block.refs -= 1
            if not block.refs:
                self.free_queue.append(block)
        self.free = len(self.free_queue)
        del self.held[i], self.tokens[i]

    def _take(self, request_id: int, blocks: int) -> None:
        for _ in range(blocks):
            self._add_block(request_id, self._get_free_block(request_id))

    def _load_or_allocate(self, request_id: int, keys: list[BlockKey]) -> int:
        node: BlockStub | None = self.root
        matched = 0
        for key in keys:
            found = node.find_matching_block(key, partial=True) if node else BlockMatch()
            block = found.block
            matched += found.tokens
            node = None if found.partial else block
            if block is None or (found.partial and (block.refs or block.next)):
                block = self._get_free_block(request_id)
                block.key, block.is_full = key, len(key) == self.size
            else:
                if found.partial:
                    block.free_leaf_block()
                self._claim(block)
            self._add_block(request_id, block)
        return matched

    def _get_free_block(self, request_id: int) -> BlockStub:
        assert self.free_queue, "No free blocks left"
        block = self.free_queue[0]
        block.free_with_children()
        self._claim(block)
        owner = self.block_to_sequence.get(block)
        if owner in self.valid_for_store and owner != request_id:
            self.valid_for_store[owner] = False
        self.block_to_sequence[block] = request_id
        return block

    def _claim(self, block: BlockStub) -> None:
        if not block.refs:
            self.free_queue.remove(block)

    def _add_block(self, request_id: int, block: BlockStub) -> None:
        block.refs += 1
        self.allocated[request_id].append(block)
        self.held[request_id] += 1
        self.free = len(self.free_queue)

    def _store(self, r: LlmRequestStub, *, partial: bool) -> None:
        tokens, node, need_match = r.get_unique_tokens(0), self.root, True
        for at, key in enumerate(self._chop(tokens, len(tokens) - 1, partial=partial)):
            match = node.find_matching_block(key, partial=False).block if need_match else None
            if match is None:
                need_match = False
                match = self.allocated[r.request_id][at]
                match.key, match.is_full, match.prev = key, len(key) == self.size, node
                node.next.setdefault(key, match)
            node = match

    def _chop(self, tokens: Sequence[StreamToken], usable: int, *, partial: bool) -> list[BlockKey]:
        pieces = [
            tuple(tokens[at : min(at + self.size, usable)]) for at in range(0, usable, self.size)
        ]
        return [piece for piece in pieces if partial or len(piece) == self.size]
