# mypyc: compile
"""The queue of free blocks, which determines the order of allocation."""

from __future__ import annotations

from array import array
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
from mypy_extensions import mypyc_attr

Ints = npt.NDArray[np.intc]


def ints_view(column: array[int]) -> Ints:
    """Return a numpy view of ``array("i")``."""
    # The length of the array must not change while the view is in use.
    return np.frombuffer(column, dtype=np.intc)


@mypyc_attr(allow_interpreted_subclasses=True, serializable=True)
class FreeQueue:
    """Queue of the free blocks. Initially it contains the blocks 1 to ``size``."""

    # The queue is the section from ``_head`` to ``_tail`` of an array with three times ``size``
    # entries. ``_place[b]`` is the index of block ``b`` in the array, or -1 if the block is not in
    # the queue. An array entry whose index differs from ``_place`` of its block is stale and is
    # skipped.

    def __init__(self, size: int) -> None:
        self._size = self.length = size
        self._line = array("i", bytes(12 * size))
        self._place = array("i", bytes(4 * (size + 1)))
        self._head, self._tail = size, size
        self._lay(np.arange(1, size + 1, dtype=np.intc))
        self._place[0] = -1

    def __len__(self) -> int:
        return self.length

    def __contains__(self, block: int) -> bool:
        return self._place[block] >= 0

    def __iter__(self) -> Iterator[int]:
        return iter(self._present().tolist())

    def pop(self) -> int:
        """Remove and return the first block."""
        # The queue must not be empty.
        line, place, head = self._line, self._place, self._head
        while place[line[head]] != head:
            head += 1
        block = line[head]
        place[block] = -1
        self._head = head + 1
        self.length -= 1
        return block

    def take(self, count: int) -> Ints:
        """Remove and return the first ``count`` blocks."""
        # The queue must contain at least this number.
        line, place, span = ints_view(self._line), ints_view(self._place), 2 * count
        while True:
            part = line[self._head : min(self._head + span, self._tail)]
            at = np.flatnonzero(place[part] == np.arange(self._head, self._head + len(part)))
            if len(at) >= count:
                break
            span *= 2
        at = at[:count]
        blocks = part[at]
        place[blocks] = -1
        self._head += int(at[-1]) + 1
        self.length -= count
        return blocks

    def append(self, blocks: Ints) -> None:
        """Append blocks in the given order."""
        # The blocks must not be in the queue.
        if self._tail + len(blocks) > len(self._line):
            self._close_up()
        self._lay(blocks)
        self.length += len(blocks)

    def prepend(self, blocks: Ints) -> None:
        """Insert blocks at the front, in the given order."""
        # The blocks must not be in the queue.
        if self._head < len(blocks):
            self._close_up()
        start = self._head - len(blocks)
        ints_view(self._line)[start : self._head] = blocks
        ints_view(self._place)[blocks] = np.arange(start, self._head)
        self._head = start
        self.length += len(blocks)

    def remove(self, blocks: Ints) -> None:
        """Remove blocks from the queue."""
        ints_view(self._place)[blocks] = -1
        self.length -= len(blocks)

    def _present(self) -> Ints:
        part = ints_view(self._line)[self._head : self._tail]
        present: Ints = part[ints_view(self._place)[part] == np.arange(self._head, self._tail)]
        return present

    def _close_up(self) -> None:
        """Remove stale entries, which frees space at the front and the back of the array."""
        present = self._present()
        self._head = self._tail = self._size
        self._lay(present)

    def _lay(self, blocks: Ints) -> None:
        end = self._tail + len(blocks)
        ints_view(self._line)[self._tail : end] = blocks
        ints_view(self._place)[blocks] = np.arange(self._tail, end)
        self._tail = end
