# mypyc: compile
"""Group of requests that decode in lockstep, advanced by one shared counter."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from typing import Generic, TypeVar

from mypy_extensions import mypyc_attr


@mypyc_attr(allow_interpreted_subclasses=True, serializable=True)
class DecodingRequest:
    """State of a request in the group; in tokens, except ``id``, ``order`` and ``joined``.

    - ``computed``: tokens with KV, including tokens of steps in flight.
    - ``length``: known tokens; at ``stop_length`` the request ends.
    - ``placeholders``: tokens not delivered yet; ``in_flight``: tokens being computed.
    - ``order``: position among the running requests.
    - ``joined``: the group's step at which it joined. Its counts do not change while it is a
      member.
    """

    def __init__(self, id: int, length: int, stop_length: int) -> None:
        self.id = id
        self.length = length
        self.stop_length = stop_length
        self.order = self.joined = 0
        self.computed = self.placeholders = self.in_flight = 0


R = TypeVar("R", bound=DecodingRequest)


@mypyc_attr(allow_interpreted_subclasses=True, serializable=True)
class DecodeGroup(Generic[R]):
    """Running requests that each compute exactly one token per step.

    ``scheduled`` counts the steps decided for the group and ``delivered`` the steps whose tokens
    have been delivered; a pipelined scheduler is one step ahead. A member needs a new block every
    ``block_size`` steps, when its computed tokens fill its blocks. Members are stored by that step
    modulo ``block_size``, so that a step accesses only the members that need a block.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.members: dict[int, R] = {}
        self.scheduled = 0
        self.delivered = 0
        #: Total tokens with KV of all members.
        self.context = 0
        self._borders: list[dict[int, R]] = [{} for _ in range(block_size)]
        self._stops: list[tuple[int, int, int]] = []

    def __len__(self) -> int:
        return len(self.members)

    def __contains__(self, r: R) -> bool:
        return r.id in self.members

    def join(self, r: R) -> None:
        """Add ``r`` to the group from the step that is being decided."""
        r.joined = self.scheduled
        self.members[r.id] = r
        self.context += r.computed
        self._border(r)[r.id] = r
        heappush(self._stops, (self._stop(r), r.id, r.joined))

    def leave(self, r: R) -> int:
        """Remove ``r`` and update its counts; return the number of its tokens not delivered yet."""
        del self.members[r.id]
        del self._border(r)[r.id]
        steps = self.scheduled - r.joined
        delivered = max(self.delivered - r.joined, 0)
        r.computed += steps
        r.length += delivered
        r.placeholders += steps - delivered
        r.in_flight += steps - delivered
        self.context -= r.computed
        return steps - delivered

    def step(self, steps: int = 1) -> None:
        """Advance the group by ``steps``: every member computes one token per step."""
        self.scheduled += steps
        self.context += steps * len(self.members)

    def in_flight(self, r: R) -> int:
        """Return the tokens of ``r`` that are being computed."""
        return r.in_flight + self.scheduled - max(self.delivered, r.joined)

    def computed(self, r: R) -> int:
        """Return the tokens of ``r`` that have KV."""
        return r.computed + self.scheduled - r.joined

    def length(self, r: R) -> int:
        """Return the known tokens of ``r``."""
        return r.length + max(self.delivered - r.joined, 0)

    def full_block_members(self, ahead: int = 0) -> dict[int, R]:
        """Return the members whose blocks are full ``ahead`` steps from now."""
        return self._borders[(self.scheduled + ahead) % self.block_size]

    def quiet(self, aheads: Sequence[int] = (0,)) -> int:
        """Return for how many steps no member's blocks are full, for each offset in ``aheads``.

        At most ``block_size``, because the pattern repeats.
        """
        borders, size = self._borders, self.block_size
        for step in range(size):
            for ahead in aheads:
                if borders[(self.scheduled + step + ahead) % size]:
                    return step
        return size

    def growth(self, steps: int) -> list[int]:
        """Return how many members need a block in each of the next ``steps`` steps."""
        first = self.scheduled % self.block_size
        counts = list(map(len, self._borders))
        round_ = counts[first:] + counts[:first]
        return (round_ * (steps // self.block_size + 1))[:steps]

    def stopped(self, steps: int) -> list[R]:
        """Return members that reach ``stop_length`` by the group's step ``steps`` (once each)."""
        found: list[R] = []
        while (stop := self.next_stop()) is not None and stop <= steps:
            found.append(self.members[heappop(self._stops)[1]])
        return found

    def next_stop(self) -> int | None:
        """Return the group's step at which the first member reaches ``stop_length``, or None."""
        stops = self._stops
        while stops:
            stop, i, joined = stops[0]
            if i in self.members and self.members[i].joined == joined:
                return stop
            heappop(stops)
        return None

    def _stop(self, r: R) -> int:
        """Return the group's step at which ``r`` needs no further token."""
        return r.joined + r.stop_length - r.length - r.placeholders

    def _border(self, r: R) -> dict[int, R]:
        return self._borders[(r.joined - r.computed) % self.block_size]
