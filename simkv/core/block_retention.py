"""A block pool that retains cached blocks of ended requests for a time.

pool = RetentionPool(100)
pool.hold = 30.0  # seconds for the blocks that are released next
pool.release(7)
pool.hold = 0.0
pool.queue.set_time(12.0)

No engine release retains blocks in this way; the pool shows the effect that this would have.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush
from math import inf

import numpy as np

from simkv.core.block_pool import BlockPool
from simkv.core.free_queue import FreeQueue, Ints, ints_view


class RetentionQueue(FreeQueue):
    """Free queue with retained blocks.

    Blocks whose retention has ended are allocated first, and retained blocks last. Among retained
    blocks, the one whose retention ends first is allocated first.
    """

    # A retention of infinite duration never ends.

    # If FreeQueue is compiled, copies must include the attributes of this class.
    __mypyc_attrs__ = (*getattr(FreeQueue, "__mypyc_attrs__", ()), "__dict__")

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self._now: float | None = 0.0
        self._number = 0
        #: Number of the latest retention of each retained block.
        self._retained: dict[int, int] = {}
        self._heap: list[tuple[float, int, int]] = []  # end, number, block
        self._fresh: list[tuple[float, int, int]] = []  # seconds, number, block
        self._ended: dict[int, None] = {}

    @property
    def has_deadline(self) -> bool:
        """Whether any block is retained for a finite time."""
        self._drop_stale()
        return bool(self._fresh) or bool(self._heap and self._heap[0][0] < inf)

    def set_time(self, now: float) -> None:
        """Set the current time in seconds."""
        # The retention of blocks inserted since ``stop_clock`` starts at this time.
        self._now = now
        for seconds, number, block in self._fresh:
            if self._retained.get(block) == number:
                heappush(self._heap, (now + seconds, number, block))
        self._fresh.clear()
        while self._heap and self._heap[0][0] <= now:
            _, number, block = heappop(self._heap)
            if self._retained.get(block) == number:
                del self._retained[block]
                self._ended[block] = None

    def stop_clock(self) -> None:
        """Delay the start of later retentions until the next ``set_time``."""
        self._now = None

    def retain(self, blocks: Ints, seconds: float) -> None:
        """Insert blocks and retain them for ``seconds``."""
        # The blocks must not be in the queue.
        for block in blocks.tolist():
            self._number += 1
            self._retained[block] = self._number
            if self._now is None:
                self._fresh.append((seconds, self._number, block))
            else:
                heappush(self._heap, (self._now + seconds, self._number, block))
        self.length += len(blocks)

    def pop(self) -> int:
        if self._ended:
            self.length -= 1
            block = next(iter(self._ended))
            del self._ended[block]
            return block
        if self.length > len(self._retained):
            return super().pop()
        self._drop_stale()
        _, _, block = heappop(self._heap)
        del self._retained[block]
        self.length -= 1
        return block

    def take(self, count: int) -> Ints:
        if not self._ended and count <= self.length - len(self._retained):
            return super().take(count)
        return np.array([self.pop() for _ in range(count)], dtype=np.intc)

    def remove(self, blocks: Ints) -> None:
        others = []
        for block in blocks.tolist():
            if block in self._retained:
                del self._retained[block]
            elif block in self._ended:
                del self._ended[block]
            else:
                others.append(block)
        self.length -= len(blocks) - len(others)
        super().remove(np.array(others, dtype=np.intc))

    def __contains__(self, block: int) -> bool:
        return block in self._ended or block in self._retained or super().__contains__(block)

    def __iter__(self) -> Iterator[int]:
        valid = [one for one in sorted(self._heap) if self._retained.get(one[2]) == one[1]]
        fresh = [one for one in self._fresh if self._retained.get(one[2]) == one[1]]
        yield from self._ended
        yield from super().__iter__()
        yield from (block for _, _, block in (*valid, *fresh))

    def _drop_stale(self) -> None:
        heap = self._heap
        while heap and self._retained.get(heap[0][2]) != heap[0][1]:
            heappop(heap)


class RetentionPool(BlockPool):
    """Pool that retains cached blocks for ``hold`` seconds after their release.

    A retained block is allocated only if no other block is left.
    """

    # If BlockPool is compiled, copies must include the attributes of this class.
    __mypyc_attrs__ = (*getattr(BlockPool, "__mypyc_attrs__", ()), "__dict__")

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.hold = 0.0
        self._free = self.queue = RetentionQueue(num_blocks)

    def _unreference(self, visited: Ints, *, keyless_first: bool) -> None:
        if not self.hold:
            super()._unreference(visited, keyless_first=keyless_first)
            return
        references = ints_view(self._references)
        references[visited] -= 1
        free = visited[references[visited] == 0]
        keyed = np.frombuffer(self._key_of, dtype=np.int64)[free] > 0
        insert = self.queue.prepend if keyless_first else self.queue.append
        insert(free[~keyed])
        self.queue.retain(free[keyed], self.hold)
