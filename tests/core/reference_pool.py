"""Reference implementation of ``BlockPool`` that handles blocks one by one."""

from __future__ import annotations

from collections.abc import Sequence


class PlainPool:
    """A pool with free blocks in a list and keys in dicts, without optimizations."""

    def __init__(self, num_blocks: int) -> None:
        self.tables: dict[int, list[int]] = {}
        self.free = list(range(1, num_blocks + 1))
        self.key_of: dict[int, int] = {}
        self.blocks_of: dict[int, list[int]] = {}

    def held(self, block: int) -> int:
        return sum(table.count(block) for table in self.tables.values())

    def take(self, owner: int, count: int) -> None:
        taken, self.free = self.free[:count], self.free[count:]
        for block in taken:
            if key := self.key_of.pop(block, 0):
                self.blocks_of[key].remove(block)
        self.tables.setdefault(owner, []).extend(taken)

    def share(self, owner: int, blocks: Sequence[int]) -> None:
        self.free = [block for block in self.free if block not in blocks]
        self.tables.setdefault(owner, []).extend(blocks)

    def release(self, owner: int, *, keyless_first: bool) -> None:
        table = self.tables.pop(owner, [])
        freed = [block for block in reversed(table) if not self.held(block)]
        first = [block for block in freed if keyless_first and block not in self.key_of]
        self.free = [*first, *self.free, *(block for block in freed if block not in first)]

    def register(self, block: int, key: int) -> None:
        if block not in self.key_of:
            self.key_of[block] = key
            self.blocks_of.setdefault(key, []).append(block)

    def lookup(self, keys: Sequence[int]) -> list[int]:
        hits: list[int] = []
        for key in keys:
            if not self.blocks_of.get(key):
                break
            hits.append(self.blocks_of[key][0])
        return hits
