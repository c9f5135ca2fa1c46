# mypyc: compile
"""Waiting queue that skips requests for which too few blocks are free."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from itertools import takewhile
from operator import itemgetter

from mypy_extensions import mypyc_attr

from simkv.core.request import Prompt
from simkv.core.scheduler_protocol import blocks_for
from simkv.schedulers.vllm.request_state import RequestState

#: Position of a request in the queue; the smallest is first, and the last item is the request id.
QueuePosition = tuple[float, ...]


@mypyc_attr(allow_interpreted_subclasses=True, serializable=True)
class SizeBucketedQueue:
    """Waiting requests in buckets by the minimum number of blocks that they need.

    The function ``least`` returns this number. Within a bucket, requests are in arrival order or,
    with ``priority``, in priority order.
    """

    # The cost of ``first`` therefore depends on the number of buckets instead of the number of
    # requests.

    def __init__(self, least: Callable[[RequestState], int], *, priority: bool) -> None:
        self._least = least
        self._priority = priority
        self._shelves: dict[int, list[QueuePosition]] = {}
        self._stands: dict[int, tuple[QueuePosition, int, RequestState]] = {}
        self._aside: list[tuple[QueuePosition, RequestState]] = []
        self._front = self._back = 0

    def __len__(self) -> int:
        return len(self._stands)

    def __iter__(self) -> Iterator[RequestState]:
        return (r for _, _, r in sorted(self._stands.values(), key=itemgetter(0)))

    def head(self) -> RequestState:
        return self._stands[int(min(shelf[0] for shelf in self._shelves.values())[-1])][2]

    def first(self, room: float) -> RequestState | None:
        """Return the first request that may fit into ``room`` blocks, or None."""
        heads = [shelf[0] for least, shelf in self._shelves.items() if least <= room]
        return self._stands[int(min(heads)[-1])][2] if heads else None

    def add(self, r: RequestState) -> None:
        self._back += 1
        self._put(r, self._place(r, self._back))

    def put_back(self, r: RequestState) -> None:
        self._front -= 1
        self._put(r, self._place(r, self._front))

    def remove(self, r: RequestState) -> None:
        place, least, _ = self._stands.pop(r.id)
        shelf = self._shelves[least]
        del shelf[bisect_left(shelf, place)]
        if not shelf:
            del self._shelves[least]

    def set_aside(self, r: RequestState) -> None:
        self._aside.append((self._stands[r.id][0], r))
        self.remove(r)

    def restore_aside(self) -> list[RequestState]:
        aside, self._aside = self._aside, []
        for place, r in aside:
            self._put(r, place)
        return [r for _, r in aside]

    def _put(self, r: RequestState, place: QueuePosition) -> None:
        least = self._least(r)
        self._stands[r.id] = place, least, r
        insort(self._shelves.setdefault(least, []), place)

    def _place(self, r: RequestState, turn: int) -> QueuePosition:
        if self._priority:
            return (r.prompt.priority, r.prompt.arrival, r.id)
        return (turn, r.id)


@mypyc_attr(allow_interpreted_subclasses=True, serializable=True)
class SharedTokenIndex:
    """Record of whether prompts contain tokens of other requests.

    - ``others``: whether any prompt contains tokens of another request.
    - ``outputs``: whether any prompt contains output tokens.
    """

    # Waiting requests may find such tokens in the prefix cache.

    def __init__(self, block_size: int, *, shared: bool) -> None:
        self._block_size, self._shared = block_size, shared
        self.others = self.outputs = False

    def see(self, prompt: Prompt) -> None:
        """Update the record with a new prompt."""
        # The own tokens of the prompt and common prefixes do not count.
        if not self._shared:
            return
        streams = {segment.stream for segment in prompt.segments}
        self.outputs |= any(stream.startswith("o") for stream in streams)
        others = streams - {f"u{prompt.id}", f"o{prompt.id}"}
        self.others |= any(stream[0] in "uo" for stream in others)

    def least(self, r: RequestState) -> int:
        """Return the minimum number of free blocks to admit a waiting request.

        The request may need more, depending on the content of the prefix cache.
        """
        # This is the number of blocks of the request's own tokens, because only tokens shared with
        # other requests can be cached. The number is valid only while ``others`` is false;
        # otherwise the own tokens can be cached, too. The result is 0 for a request whose previous
        # step is still in flight, so that such a request is always tried.
        if r.stale:
            return 0
        own, shared = f"u{r.id}", 0
        if self._shared and r.prompt.segments:
            before = takewhile(lambda segment: segment.stream != own, r.prompt.segments)
            shared = sum(segment.end - segment.start for segment in before)
        return max(blocks_for(r.length, self._block_size) - shared // self._block_size, 0)
