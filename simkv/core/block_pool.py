# mypyc: compile
"""Pool of KV-cache blocks."""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Sequence

import numpy as np
import numpy.typing as npt
from mypy_extensions import mypyc_attr

from simkv.core.free_queue import FreeQueue, Ints, ints_view

#: Up to this number of blocks, a loop over blocks is as fast as numpy.
SMALL_BATCH = 4
#: An empty block table; callers must not modify it.
NO_BLOCKS: array[int] = array("i")


@mypyc_attr(allow_interpreted_subclasses=True, serializable=True)
class BlockPool:
    """Pool of KV-cache blocks with reference counts, a prefix cache and block tables.

    Each block table belongs to an owner, such as a request. Blocks are numbered from 1. A free
    block stays in the prefix cache until it is allocated again.
    """

    # Block 0 is the null block that engines use for padding. Blocks are allocated from the front of
    # the free queue. Block numbers and keys are stored in arrays, so that an operation on thousands
    # of blocks is fast.

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.tables: dict[int, array[int]] = {}
        self._free = FreeQueue(num_blocks)
        self._references = array("i", bytes(4 * (num_blocks + 1)))
        # The key of each block (0: none), and the block of each key. If several blocks have the
        # same key, ``_block_of`` has the negative number of the block registered first, and
        # ``_several`` lists all of them.
        self._key_of = array("q", bytes(8 * (num_blocks + 1)))
        self._block_of = array("i", bytes(4))
        self._several: dict[int, list[int]] = {}

    @property
    def free(self) -> int:
        """Number of blocks that can be allocated.

        Cached blocks count if no block table contains them.
        """
        return self._free.length

    @property
    def cached(self) -> int:
        """Number of blocks in the prefix cache."""
        return len(self._key_of) - self._key_of.count(0)

    def keys(self) -> npt.NDArray[np.int64]:
        """Return an array view with the key of each block; 0 means no key."""
        return np.frombuffer(self._key_of, dtype=np.int64)

    def held(self, owner: int) -> int:
        """Return the number of blocks in the table of ``owner``."""
        return len(self.tables.get(owner, ()))

    def holdings(self) -> dict[int, int]:
        """Return the number of blocks in each table, by owner.

        A shared block counts for each owner.
        """
        return {owner: len(table) for owner, table in self.tables.items()}

    def is_free(self, block: int) -> bool:
        """Return whether no block table contains ``block``."""
        return self._references[block] == 0

    def count_unreferenced(self, blocks: array[int]) -> int:
        """Return the number of blocks among ``blocks`` that no block table contains."""
        return len(blocks) - int(np.count_nonzero(ints_view(self._references)[ints_view(blocks)]))

    def take(self, owner: int, count: int) -> array[int]:
        """Append ``count`` blocks from the front of the free queue to the table of ``owner``.

        Allocated blocks leave the prefix cache. Raises RuntimeError if fewer blocks are free.
        """
        if count > self._free.length:
            raise RuntimeError(f"{count} blocks requested, {self._free.length} free")
        if count == 1:  # a decode usually takes one block
            block = self._free.pop()
            self._references[block] = 1
            if key := self._key_of[block]:
                self._forget_one(block, key)
            blocks = array("i", (block,))
        elif count:
            taken = self._free.take(count)
            ints_view(self._references)[taken] = 1
            self._forget(taken)
            blocks = _column(taken)
        else:
            blocks = array("i")
        table = self.tables.get(owner)
        if table is None:
            table = self.tables[owner] = array("i")
        table.extend(blocks)
        return blocks

    def take_in_turns(self, owners: Sequence[int], count: int) -> None:
        """Append ``count`` free blocks to the tables of ``owners``, one block per owner in turn.

        Raises RuntimeError if fewer blocks are free.
        """
        # Every owner must have a table.
        if count > self._free.length:
            raise RuntimeError(f"{count} blocks requested, {self._free.length} free")
        if count == 0:
            return
        taken = self._free.take(count)
        ints_view(self._references)[taken] = 1
        self._forget(taken)
        blocks = _column(taken)
        for turn, owner in enumerate(owners):
            self.tables[owner].extend(blocks[turn :: len(owners)])

    def are_unused(self, keys: Sequence[array[int]]) -> bool:
        """Return whether all ``keys`` are different and no block has any of them."""
        of_key, known = self._block_of, len(self._block_of)
        for part in keys:
            for key in part:
                if key < known and of_key[key]:
                    return False
        return len(set().union(*keys)) == sum(map(len, keys))

    def share(self, owner: int, blocks: Sequence[int]) -> None:
        """Append cached ``blocks`` to the table of ``owner``."""
        shared, references = np.array(blocks, dtype=np.intc), ints_view(self._references)
        self._free.remove(shared[references[shared] == 0])
        references[shared] += 1
        self.tables.setdefault(owner, array("i")).extend(_column(shared))

    def release(self, owner: int, *, keyless_first: bool = False) -> None:
        """Remove the table of ``owner`` and free its blocks, last block first.

        Blocks in other tables stay allocated. Freed blocks go to the back of the free queue. With
        ``keyless_first``, freed blocks without a key go to the front (vLLM since 0.24).
        """
        # At the front, blocks are in the same order.
        if table := self.tables.pop(owner, None):
            self._unreference(ints_view(table)[::-1], keyless_first=keyless_first)

    def release_head(self, owner: int, count: int, *, keyless_first: bool = False) -> None:
        """Free the first ``count`` blocks in the table of ``owner``.

        The last of these blocks is freed first.
        """
        head = np.array(self.tables[owner][:count], dtype=np.intc)
        del self.tables[owner][:count]
        self._unreference(head[::-1], keyless_first=keyless_first)

    def release_at(self, owner: int, places: Sequence[int], *, keyless_first: bool = False) -> None:
        """Free the blocks at the indices ``places`` of the table of ``owner``, in this order."""
        table = self.tables[owner]
        blocks = np.array([table[place] for place in places], dtype=np.intc)
        for place in sorted(places, reverse=True):
            del table[place]
        self._unreference(blocks, keyless_first=keyless_first)

    def to_end(self, owner: int, place: int) -> None:
        """Move the block at index ``place`` to the end of the owner's table."""
        table = self.tables[owner]
        table.append(table.pop(place))

    def abandon(self, owner: int) -> None:
        """Remove the table of ``owner`` without freeing its blocks.

        This simulates engines that leak blocks.
        """
        self.tables.pop(owner, None)

    def register(self, block: int, key: int) -> None:
        """Register ``block`` under ``key``. A block that already has a key keeps it."""
        if self._key_of[block]:
            return
        self._extend_keys(key)
        self._key_of[block] = key
        first = self._block_of[key]
        if not first:
            self._block_of[key] = block
        else:
            self._several.setdefault(key, [first]).append(block)
            self._block_of[key] = -abs(first)

    def register_all(self, blocks: array[int], keys: array[int]) -> None:
        """Register each block under the key at the same index."""
        fresh = False
        if len(keys) > SMALL_BATCH:
            named = np.frombuffer(keys, dtype=np.int64)
            self._extend_keys(int(named.max()))
            of_block, of_key = (
                np.frombuffer(self._key_of, dtype=np.int64),
                ints_view(self._block_of),
            )
            fresh = not (of_block[ints_view(blocks)].any() or of_key[named].any())
        if fresh:
            of_block[ints_view(blocks)], of_key[named] = named, ints_view(blocks)
            return
        for block, key in zip(blocks, keys, strict=True):
            self.register(block, key)

    def lookup(self, keys: Sequence[int]) -> array[int]:
        """Return the cached blocks for the first keys, up to the first key that is not cached."""
        # If several blocks have the same key, the result contains the block that was registered
        # first.
        if not keys or keys[0] >= len(self._block_of) or not self._block_of[keys[0]]:
            return array("i")
        found = self._found(keys)
        misses = np.flatnonzero(found == 0)
        return _column(found[: misses[0]] if len(misses) else found)

    def find(self, keys: Sequence[int]) -> array[int]:
        """Return the block number for each key; 0 for keys that are not cached."""
        return _column(self._found(keys)) if keys else array("i")

    def free_order(self) -> tuple[int, ...]:
        """Return the numbers of the free blocks in the order of allocation."""
        return tuple(self._free)

    def fingerprint(self) -> Hashable:
        """Return the state that determines future allocations."""
        # This is the number of free blocks if no block is cached, otherwise the whole state.
        if not self.cached:
            return self._free.length
        tables = tuple((owner, tuple(table)) for owner, table in sorted(self.tables.items()))
        shared = tuple((key, tuple(blocks)) for key, blocks in sorted(self._several.items()))
        return (tuple(self._free), self._key_of.tobytes(), shared, tables)

    def check(self) -> None:
        """Assert the invariants of the pool, such as correct reference counts."""
        # Free blocks and blocks in tables add up to the total, reference counts match the tables,
        # no table lists a block twice, and no block is both free and in a table. Leaked blocks
        # (``abandon``) violate these invariants.
        counts = [0] * (self.num_blocks + 1)
        for table in self.tables.values():
            assert len(set(table)) == len(table), "a block table lists a block twice"
            for block in table:
                counts[block] += 1
        assert counts == self._references.tolist(), "reference counts differ from the tables"
        held, free = sum(1 for count in counts if count), list(self._free)
        assert len(free) == len(set(free)) == self.free, "the free queue has a wrong length"
        assert held + len(free) == self.num_blocks, "free + held differs from the total"
        assert all(counts[block] == 0 for block in free), "a held block is in the free queue"

    def _unreference(self, visited: Ints, *, keyless_first: bool) -> None:
        references = ints_view(self._references)
        references[visited] -= 1
        free = visited[references[visited] == 0]
        if keyless_first:
            keyed = np.frombuffer(self._key_of, dtype=np.int64)[free] > 0
            self._free.prepend(free[~keyed])
            free = free[keyed]
        self._free.append(free)

    def _found(self, keys: Sequence[int]) -> Ints:
        found = ints_view(self._block_of).take(np.asarray(keys), mode="clip")
        found[np.asarray(keys) >= len(self._block_of)] = 0
        blocks: Ints = np.abs(found)
        return blocks

    def _extend_keys(self, key: int) -> None:
        """Extend the array of blocks by key so that it contains ``key``."""
        if key >= len(self._block_of):
            longer = max(key + 1, 2 * len(self._block_of))
            self._block_of.frombytes(bytes(4 * (longer - len(self._block_of))))

    def forget(self, block: int) -> None:
        """Remove the key of ``block``."""
        if key := self._key_of[block]:
            self._forget_one(block, key)

    def _forget(self, blocks: Ints) -> None:
        of_block, of_key = np.frombuffer(self._key_of, dtype=np.int64), ints_view(self._block_of)
        keys = of_block[blocks]
        if self._several and (of_key[keys] < 0).any():
            for block, key in zip(blocks.tolist(), keys.tolist(), strict=True):
                self._forget_one(block, key)
        else:
            of_key[keys] = 0
            of_block[blocks] = 0

    def _forget_one(self, block: int, key: int) -> None:
        """Remove ``key`` from ``block``. Other blocks with the key stay registered."""
        self._key_of[block] = 0
        if key not in self._several:
            self._block_of[key] = 0
            return
        blocks = self._several[key]
        blocks.remove(block)
        self._block_of[key] = -blocks[0]
        if len(blocks) == 1:
            self._block_of[key] = blocks[0]
            del self._several[key]


@mypyc_attr(allow_interpreted_subclasses=True, serializable=True)
class UnnumberedPool(BlockPool):
    """Pool without block numbers and without a prefix cache. It is faster than ``BlockPool``."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(0)
        self.num_blocks = self._left = num_blocks
        self._held: dict[int, int] = {}

    @property
    def free(self) -> int:
        return self._left

    def held(self, owner: int) -> int:
        return self._held.get(owner, 0)

    def holdings(self) -> dict[int, int]:
        return dict(self._held)

    def take(self, owner: int, count: int) -> array[int]:
        """Allocate ``count`` blocks to ``owner``. Raises RuntimeError if fewer blocks are free."""
        if count > self._left:
            raise RuntimeError(f"{count} blocks requested, {self._left} free")
        self._left -= count
        self._held[owner] = self._held.get(owner, 0) + count
        return NO_BLOCKS

    def release(self, owner: int, *, keyless_first: bool = False) -> None:  # noqa: ARG002
        self._left += self._held.pop(owner, 0)

    def abandon(self, owner: int) -> None:
        self._held.pop(owner, None)

    def fingerprint(self) -> Hashable:
        return self._left

    def check(self) -> None:
        """Assert that the numbers of free and held blocks add up to the total."""
        assert self._left >= 0
        assert self._left + sum(self._held.values()) == self.num_blocks


def _column(blocks: Ints) -> array[int]:
    return array("i", blocks.tobytes())


@mypyc_attr(allow_interpreted_subclasses=True, serializable=True)
class BlockCounter:
    """Counter of free blocks. Its callers store the number of blocks of each owner."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.free = num_blocks

    def take(self, owner: int, count: int) -> None:  # noqa: ARG002
        """Allocate ``count`` blocks. Raises RuntimeError if fewer blocks are free."""
        if count > self.free:
            raise RuntimeError(f"{count} blocks requested, {self.free} free")
        self.free -= count

    def return_blocks(self, count: int) -> None:
        """Free ``count`` blocks. Raises RuntimeError if they were never allocated."""
        if self.free + count > self.num_blocks:
            raise RuntimeError(f"{count} blocks freed, {self.num_blocks - self.free} allocated")
        self.free += count

    def fingerprint(self) -> Hashable:
        """Return the state that determines future allocations."""
        return self.free

    def check(self) -> None:
        """Assert that the number of free blocks is between 0 and ``num_blocks``."""
        assert 0 <= self.free <= self.num_blocks
