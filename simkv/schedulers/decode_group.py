# mypyc: compile
"""Group of requests that decode in lockstep.

One shared step counter advances the token counts of all requests in the group at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from typing import Generic, TypeVar

from mypy_extensions import mypyc_attr


@mypyc_attr(allow_interpreted_subclasses=True, serializable=True)
class DecodingRequest:
    """Token counts of a request that can join a ``DecodeGroup``.

    - ``id``: number of the request.
    - ``computed``: tokens with KV, including the tokens of steps in flight.
    - ``length``: known tokens, prompt and output. The request ends at ``stop_length`` tokens.
    - ``placeholders``: output tokens that are scheduled but not delivered yet.
    - ``in_flight``: tokens that scheduled steps are computing.
    - ``order``: position among the running requests, by admission.
    - ``joined``: step count of the group when the request joined. While it is a member, its own
      token counts do not change; the group derives the current ones from its step count.
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

    ``scheduled`` is the number of steps scheduled for the group, and ``delivered`` the number of
    steps whose tokens were delivered. With asynchronous scheduling, ``scheduled`` is one step
    ahead. A member needs a new KV block every ``block_size`` steps, when its computed tokens fill
    its blocks. The group indexes its members by that step modulo ``block_size``, so a step visits
    only the members that need a block.
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
        """Add ``r`` to the group; the step that is being scheduled is its first one as a member."""
        r.joined = self.scheduled
        self.members[r.id] = r
        self.context += r.computed
        self._border(r)[r.id] = r
        heappush(self._stops, (self._stop(r), r.id, r.joined))

    def leave(self, r: R) -> int:
        """Remove ``r`` and update its token counts.

        Returns the number of tokens that ``r`` computed as a member and that are not delivered yet.
        """
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
        """Advance the group by ``steps`` steps: every member computes one token per step."""
        self.scheduled += steps
        self.context += steps * len(self.members)

    def in_flight(self, r: R) -> int:
        """Return the number of tokens of ``r`` that steps in flight are computing."""
        return r.in_flight + self.scheduled - max(self.delivered, r.joined)

    def computed(self, r: R) -> int:
        """Return the number of tokens of ``r`` that have KV."""
        return r.computed + self.scheduled - r.joined

    def length(self, r: R) -> int:
        """Return the number of known tokens of ``r``, prompt and output."""
        return r.length + max(self.delivered - r.joined, 0)

    def full_block_members(self, ahead: int = 0) -> dict[int, R]:
        """Return the members, by request id, whose blocks are full ``ahead`` steps from now."""
        return self._borders[(self.scheduled + ahead) % self.block_size]

    def quiet(self, aheads: Sequence[int] = (0,)) -> int:
        """Return the number of steps from now on in which no member's blocks are full.

        A step counts only if no blocks are full at any of the offsets ``aheads`` from it, in steps.
        The result is at most ``block_size``, because the pattern repeats after that.
        """
        borders, size = self._borders, self.block_size
        for step in range(size):
            for ahead in aheads:
                if borders[(self.scheduled + step + ahead) % size]:
                    return step
        return size

    def growth(self, steps: int) -> list[int]:
        """Return the number of members that need a block, for each of the next ``steps`` steps."""
        first = self.scheduled % self.block_size
        counts = list(map(len, self._borders))
        round_ = counts[first:] + counts[:first]
        return (round_ * (steps // self.block_size + 1))[:steps]

    def stopped(self, steps: int) -> list[R]:
        """Return the members that reach ``stop_length`` by step ``steps`` of the group.

        Each member is returned once, even if this is called again.
        """
        found: list[R] = []
        while (stop := self.next_stop()) is not None and stop <= steps:
            found.append(self.members[heappop(self._stops)[1]])
        return found

    def next_stop(self) -> int | None:
        """Return the first step of the group at which a member reaches ``stop_length``.

        The result is None if the group is empty.
        """
        stops = self._stops
        while stops:
            stop, i, joined = stops[0]
            if i in self.members and self.members[i].joined == joined:
                return stop
            heappop(stops)
        return None

    def _stop(self, r: R) -> int:
        """Return the step of the group at which all output tokens of ``r`` are scheduled."""
        return r.joined + r.stop_length - r.length - r.placeholders

    def _border(self, r: R) -> dict[int, R]:
        return self._borders[(r.joined - r.computed) % self.block_size]
