"""Requests that decode in lockstep: one counter grows instead of each of them."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from typing import Generic, TypeVar

from mypy_extensions import mypyc_attr


@mypyc_attr(allow_interpreted_subclasses=True, serializable=True)
class DecodingRequest:
    """What the group needs of a request; all but ``id``, ``order`` and ``joined`` are tokens.

    ``computed`` have KV, or will have it when the steps under way are done; ``length`` are known;
    ``placeholders`` are under way to be delivered, ``in_flight`` being computed. At
    ``stop_length`` the request ends. ``order`` is its place among the running requests. While it
    is in a group its counts stand still; ``joined`` is the group's step at which it came.
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
    """Running requests of which each computes exactly one token in every step.

    ``scheduled`` counts the steps that were decided for the group and ``delivered`` those whose
    tokens have come back; a pipelined scheduler is one ahead. A member needs a new block whenever
    its computed tokens fill its blocks, which is every ``block_size`` steps: members are kept by
    the step modulo ``block_size`` at which that happens, so a step touches those members only.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.members: dict[int, R] = {}
        self.scheduled = 0
        self.delivered = 0
        #: Tokens with KV of all members together.
        self.context = 0
        self._borders: list[dict[int, R]] = [{} for _ in range(block_size)]
        self._stops: list[tuple[int, int, int]] = []

    def __len__(self) -> int:
        return len(self.members)

    def __contains__(self, r: R) -> bool:
        return r.id in self.members

    def join(self, r: R) -> None:
        """Take ``r`` in from the step that is being decided on."""
        r.joined = self.scheduled
        self.members[r.id] = r
        self.context += r.computed
        self._border(r)[r.id] = r
        heappush(self._stops, (self._stop(r), r.id, r.joined))

    def leave(self, r: R) -> int:
        """Let ``r`` go with its counts brought up to date; returns its tokens still to come."""
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
        """One step (or more) has been decided: every member computes a token."""
        self.scheduled += steps
        self.context += steps * len(self.members)

    def in_flight(self, r: R) -> int:
        """Tokens of ``r`` that are being computed now."""
        return r.in_flight + self.scheduled - max(self.delivered, r.joined)

    def computed(self, r: R) -> int:
        """Tokens of ``r`` that have KV now."""
        return r.computed + self.scheduled - r.joined

    def length(self, r: R) -> int:
        """Tokens of ``r`` known now."""
        return r.length + max(self.delivered - r.joined, 0)

    def full_block_members(self, ahead: int = 0) -> dict[int, R]:
        """Members whose blocks are full in the step that comes ``ahead`` steps from now."""
        return self._borders[(self.scheduled + ahead) % self.block_size]

    def quiet(self, aheads: Sequence[int] = (0,)) -> int:
        """For how many steps from now on nobody's blocks are full, nor so many steps later.

        At most ``block_size``, after which all begins anew.
        """
        borders, size = self._borders, self.block_size
        for step in range(size):
            for ahead in aheads:
                if borders[(self.scheduled + step + ahead) % size]:
                    return step
        return size

    def growth(self, steps: int) -> list[int]:
        """How many members need a block in each of the next ``steps`` steps."""
        first = self.scheduled % self.block_size
        counts = list(map(len, self._borders))
        round_ = counts[first:] + counts[:first]
        return (round_ * (steps // self.block_size + 1))[:steps]

    def stopped(self, steps: int) -> list[R]:
        """Members that reach their ``stop_length`` with ``steps`` steps; each is named once."""
        found: list[R] = []
        while (stop := self.next_stop()) is not None and stop <= steps:
            found.append(self.members[heappop(self._stops)[1]])
        return found

    def next_stop(self) -> int | None:
        """Number of steps with which the first member reaches its ``stop_length``."""
        stops = self._stops
        while stops:
            stop, i, joined = stops[0]
            if i in self.members and self.members[i].joined == joined:
                return stop
            heappop(stops)
        return None

    def _stop(self, r: R) -> int:
        """Steps of the group after which no token of ``r`` is left to ask for."""
        return r.joined + r.stop_length - r.length - r.placeholders

    def _border(self, r: R) -> dict[int, R]:
        return self._borders[(r.joined - r.computed) % self.block_size]
