# mypyc: compile
"""State of a request in vLLM's scheduler, and the waiting queues."""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from itertools import chain

from mypy_extensions import mypyc_attr

from simkv.core.block_keys import TokenContent
from simkv.core.request import Prompt
from simkv.schedulers.vllm.release_rules import VllmRules


@mypyc_attr(allow_interpreted_subclasses=True, serializable=True)
class RequestState:
    """A request in vLLM's scheduler. Counts are in tokens unless stated otherwise.

    - ``length``: prompt tokens and delivered output tokens. The request ends at ``stop_length``.
    - ``computed``: tokens whose KV is computed, including steps in flight.
    - ``chunk``: whether the last step left some of the request's tokens to compute.
    - ``placeholders``: output tokens to be delivered.
    - ``in_flight``: tokens being computed. ``stale``: tokens that are still being computed although
      their blocks were freed.
    - ``keys``: cache keys of the full blocks. ``registered``: number of blocks in the prefix cache.
    - ``gone``: number of blocks that were freed at the start of each block table.
    - ``junction``: longest prefix-cache hit of a single layer group if the hit of all groups is
      shorter; else 0.
    - ``drafts``: draft tokens for the next step. ``discards_drafts``: whether all are rejected.
    - ``fresh``: whether the current step admits the request.
    - ``is_padded``: whether the first step of the request reserves slots for drafts.
    - ``order``: position in the order of admission.
    - ``joined``: step count of the decode group when the request joined it.
    - ``deferred``: whether a step has skipped the request since it last ran.
    """

    # ``keys`` only contains keys that were needed so far. While the request is a member of the
    # decode group, its own token counts do not change. ``deferred`` is set only if the request was
    # skipped for a reason that only steps of other requests can change.

    def __init__(self, prompt: Prompt, stop_length: int, content: TokenContent | None) -> None:
        self.id = prompt.id
        self.length = prompt.prompt_tokens
        self.stop_length = stop_length
        self.order = self.joined = 0
        self.computed = self.placeholders = self.in_flight = 0
        self.prompt = prompt
        self.content = content
        self.chunk = False
        self.stale = self.registered = 0
        self.keys = array("q")
        self.deferred = False
        self.gone: list[int] = []
        self.junction = 0
        self.drafts = 0
        self.discards_drafts = self.fresh = self.is_padded = False


@mypyc_attr(allow_interpreted_subclasses=True, serializable=True)
class FcfsQueue:
    """Waiting requests in arrival order. A preempted request returns to the front.

    ``restore_aside`` returns skipped requests to the front. With ``turned``, it reverses their
    order. With ``apart``, skipped requests form a separate queue ahead of all other requests.
    """

    def __init__(self, *, turned: bool = False, apart: bool = False) -> None:
        self._requests: OrderedDict[int, RequestState] = OrderedDict()
        self._first: OrderedDict[int, RequestState] = OrderedDict() if apart else self._requests
        self._turned = turned
        self._aside: list[RequestState] = []

    def __len__(self) -> int:
        apart = self._first is not self._requests
        return len(self._requests) + (len(self._first) if apart else 0)

    def __iter__(self) -> Iterator[RequestState]:
        if self._first is self._requests:
            return iter(self._requests.values())
        return chain(self._first.values(), self._requests.values())

    def head(self) -> RequestState:
        return next(iter((self._first or self._requests).values()))

    def add(self, r: RequestState) -> None:
        self._requests[r.id] = r

    def put_back(self, r: RequestState) -> None:
        self.add(r)
        self._requests.move_to_end(r.id, last=False)

    def remove(self, r: RequestState) -> None:
        if self._first.pop(r.id, None) is None:
            del self._requests[r.id]

    def set_aside(self, r: RequestState) -> None:
        self.remove(r)
        self._aside.append(r)

    def restore_aside(self) -> list[RequestState]:
        aside, self._aside = self._aside, []
        for r in aside if self._turned else reversed(aside):
            self._first[r.id] = r
            self._first.move_to_end(r.id, last=False)
        return aside


@mypyc_attr(allow_interpreted_subclasses=True, serializable=True)
class PriorityQueue:
    """Waiting requests sorted by (priority, arrival, id), smallest first."""

    def __init__(self) -> None:
        # in reverse order, because ``list.pop`` is fast at the end of a list
        self._requests: list[RequestState] = []
        self._aside: list[RequestState] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[RequestState]:
        return reversed(self._requests)

    def head(self) -> RequestState:
        return self._requests[-1]

    def add(self, r: RequestState) -> None:
        insort(self._requests, r, key=self._urgency)

    def put_back(self, r: RequestState) -> None:
        self.add(r)

    def remove(self, r: RequestState) -> None:
        del self._requests[bisect_left(self._requests, self._urgency(r), key=self._urgency)]

    def set_aside(self, r: RequestState) -> None:
        self.remove(r)
        self._aside.append(r)

    def restore_aside(self) -> list[RequestState]:
        aside, self._aside = self._aside, []
        for r in reversed(aside):
            self.put_back(r)
        return aside

    def _urgency(self, r: RequestState) -> tuple[float, float, int]:
        return (-r.prompt.priority, -r.prompt.arrival, -r.id)


@mypyc_attr(allow_interpreted_subclasses=True, serializable=True)
class HeapQueue(PriorityQueue):
    """Waiting requests in a heap, sorted by (priority, arrival), as in vLLM up to 0.11.

    ``tied`` is set if two requests have equal priority and arrival. vLLM raises TypeError in this
    case.
    """

    def __init__(self) -> None:
        super().__init__()
        self._heap: list[tuple[int, float, RequestState]] = []
        self.tied = False

    def add(self, r: RequestState) -> None:
        super().add(r)
        try:
            heappush(self._heap, (r.prompt.priority, r.prompt.arrival, r))
        except TypeError:
            self.tied = True

    def remove(self, r: RequestState) -> None:
        super().remove(r)
        try:
            if self._heap[0][-1] is r:
                heappop(self._heap)
            else:
                self._heap = [entry for entry in self._heap if entry[-1] is not r]
                heapify(self._heap)
        except TypeError:
            self.tied = True


def build_queue(policy: str, rules: VllmRules) -> FcfsQueue | PriorityQueue:
    """Build the waiting queue for the policy ``fcfs`` or ``priority``."""
    if policy == "fcfs":
        return FcfsQueue(turned=rules.reverses_skipped, apart=rules.queues_skipped_apart)
    return PriorityQueue() if rules.breaks_ties_by_id else HeapQueue()
