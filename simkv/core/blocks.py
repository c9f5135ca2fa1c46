"""The block pool: the one place that knows which blocks of KV cache are free and who has them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from operator import itemgetter


class BlockPool:
    """``num_blocks`` blocks of KV cache with reference counts, tables and a prefix cache.

    Blocks are numbered from 1 (0 is the null block that engines keep for padding). The free queue
    is ordered: blocks are taken from its front. A free block may still carry a key of the prefix
    cache; it keeps it until it is taken for something else, which is the only eviction.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.tables: dict[int, list[int]] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks + 1))
        self._references = [0] * (num_blocks + 1)
        # The key of each block, 0 for none, and the blocks of each key: a number for the usual one.
        self._key_of = [0] * (num_blocks + 1)
        self._blocks_of: dict[int, int | dict[int, None]] = {}

    @property
    def free(self) -> int:
        """Blocks that can be taken now, cached but unreferenced ones included."""
        return len(self._free)

    @property
    def cached(self) -> int:
        """Blocks that carry a key of the prefix cache, in use or free."""
        return len(self._key_of) - self._key_of.count(0)

    def held(self, owner: int) -> int:
        """Blocks in the table of ``owner``; 0 if it has none."""
        return len(self.tables.get(owner, ()))

    def holdings(self) -> dict[int, int]:
        """Blocks by owner; a shared block counts for each."""
        return {owner: len(table) for owner, table in self.tables.items()}

    def is_free(self, block: int) -> bool:
        """Whether nobody holds ``block``."""
        return self._references[block] == 0

    def take(self, owner: int, count: int) -> list[int]:
        """Append ``count`` blocks from the front of the free queue to the table of ``owner``.

        A taken block loses its key. Raises RuntimeError if fewer are free: callers ask first.
        """
        if count > len(self._free):
            raise RuntimeError(f"{count} blocks asked for, {len(self._free)} free")
        first, references, key_of = self._free.popitem, self._references, self._key_of
        blocks = [first(last=False)[0] for _ in range(count)]
        for block in blocks:
            references[block] = 1
            if key_of[block]:
                self._forget(block)
        self.tables.setdefault(owner, []).extend(blocks)
        return blocks

    def share(self, owner: int, blocks: Iterable[int]) -> None:
        """Append cached ``blocks`` to the table of ``owner`` and count one reference more each."""
        table = self.tables.setdefault(owner, [])
        for block in blocks:
            if self._references[block] == 0:
                del self._free[block]
            self._references[block] += 1
            table.append(block)

    def release(self, owner: int, *, keyless_first: bool = False) -> None:
        """Drop the table of ``owner``, last block first; unreferenced blocks become free.

        They go to the back of the free queue; with ``keyless_first`` those without a key go to
        its front instead, the first visited in front of all (vLLM 0.33). Does nothing if
        ``owner`` holds no table.
        """
        references, key_of, free = self._references, self._key_of, self._free
        keyless: list[int] = []
        for block in reversed(self.tables.pop(owner, ())):
            left = references[block] = references[block] - 1
            if left == 0:
                if keyless_first and not key_of[block]:
                    keyless.append(block)
                else:
                    free[block] = None
        for block in reversed(keyless):
            self._free[block] = None
            self._free.move_to_end(block, last=False)

    def abandon(self, owner: int) -> None:
        """Forget the table of ``owner`` but free nothing: its blocks leak, as in a buggy engine."""
        self.tables.pop(owner, None)

    def register(self, block: int, key: int) -> None:
        """Let ``block`` be found under ``key`` (above 0), unless it already carries a key."""
        if self._key_of[block]:
            return
        self._key_of[block] = key
        found = self._blocks_of.setdefault(key, block)
        if isinstance(found, dict):
            found[block] = None
        elif found != block:
            self._blocks_of[key] = {found: None, block: None}

    def lookup(self, keys: Sequence[int]) -> list[int]:
        """Blocks that hold the longest cached run from the start of ``keys``.

        Of several blocks with one key the one registered earliest is returned.
        """
        hits: list[int] = []
        for key in keys:
            blocks = self._blocks_of.get(key)
            if not blocks:
                break
            hits.append(blocks if isinstance(blocks, int) else next(iter(blocks)))
        return hits

    def fingerprint(self) -> Hashable:
        """What decides later allocations: the free count, and with cached blocks all of it."""
        if not self._blocks_of:
            return len(self._free)
        tables = tuple((owner, tuple(table)) for owner, table in sorted(self.tables.items()))
        several = [(key, b) for key, b in self._blocks_of.items() if isinstance(b, dict)]
        shared = tuple((key, tuple(b)) for key, b in sorted(several, key=itemgetter(0)))
        return (tuple(self._free), tuple(self._key_of), shared, tables)

    def check(self) -> None:
        """Assert the laws of the pool: free + held = total, references equal tables, no overlap.

        Leaked blocks (``abandon``) break it, as they do in the engine that leaks them.
        """
        counts = [0] * (self.num_blocks + 1)
        for table in self.tables.values():
            assert len(set(table)) == len(table), "a table names a block twice"
            for block in table:
                counts[block] += 1
        assert counts == self._references, "reference counts differ from the tables"
        held = sum(1 for count in counts if count)
        assert held + len(self._free) == self.num_blocks, "free + held differs from the total"
        assert all(counts[block] == 0 for block in self._free), "a held block is in the free queue"

    def _forget(self, block: int) -> None:
        key, self._key_of[block] = self._key_of[block], 0
        blocks = self._blocks_of[key]
        if isinstance(blocks, dict):
            del blocks[block]
        if not isinstance(blocks, dict) or not blocks:
            del self._blocks_of[key]


class BlockCounter:
    """A pool that only counts: without a prefix cache one free block is as good as another.

    Makes the same decisions as ``BlockPool`` for less work, where nobody reads block tables and
    whoever takes blocks knows how many it has.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.free = num_blocks

    def take(self, owner: int, count: int) -> None:  # noqa: ARG002
        """Hand out ``count`` blocks. Raises RuntimeError if fewer are free."""
        if count > self.free:
            raise RuntimeError(f"{count} blocks asked for, {self.free} free")
        self.free -= count

    def give_back(self, count: int) -> None:
        """Take ``count`` blocks back. Raises RuntimeError if they were never handed out."""
        if self.free + count > self.num_blocks:
            raise RuntimeError(f"{count} blocks given back, {self.num_blocks - self.free} out")
        self.free += count

    def fingerprint(self) -> Hashable:
        """What decides later allocations."""
        return self.free

    def check(self) -> None:
        """Assert the law that can be seen here: neither less nor more than all is free."""
        assert 0 <= self.free <= self.num_blocks
