"""Clients: when each request is sent, where that depends on how earlier ones were served.

    clients = Clients(requests, after={1: (0, 2.5)}, max_concurrency=8)
    clients.send(0.0)        # the requests that reach the engine now
    clients.ended(0, 3.0)    # request 0 has its answer; request 1 arrives 2.5 s later
    clients.next_time()      # 5.5

There is no clock in here: the engine's loop says what time it is. As in ``vllm bench serve``, a
request that has arrived waits in the client until fewer than ``max_concurrency`` are in flight, in
the order of arrival; its TTFT counts from the moment it is sent, and what it waited before that is
its client queue time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from heapq import heapify, heappop, heappush

from simkv.core.request import Request

#: A request comes so many seconds after the end of another.
Dependency = tuple[int, float]


class Clients:
    """What the clients send and when.

    ``after`` names, for each request that waits for another's answer, that other and how many
    seconds its client thinks in between; what is not in it arrives at its own time.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        after: Mapping[int, Dependency] | None = None,
        max_concurrency: int | None = None,
    ) -> None:
        self.requests = list(requests)
        self.after = dict(after or {})
        self.max_concurrency = max_concurrency
        #: When each request arrived at its client, and when it was sent (s).
        self.arrived: dict[int, float] = {}
        self.sent: dict[int, float] = {}
        self._by_id = {request.id: request for request in requests}
        self._followers: dict[int, list[int]] = {}
        for number, (before, _) in self.after.items():
            self._followers.setdefault(before, []).append(number)
        self._due = [(r.arrival, r.id) for r in requests if r.id not in self.after]
        heapify(self._due)
        self._queue: deque[int] = deque()
        self._in_flight: set[int] = set()

    @property
    def open(self) -> bool:
        """Whether nothing depends on how requests are served."""
        return not self.after and self.max_concurrency is None

    def next_time(self) -> float | None:
        """When the next request arrives, as far as that is known; None if none is foreseen."""
        return self._due[0][0] if self._due else None

    def send(self, now: float) -> list[Request]:
        """The requests that reach the engine at ``now`` (s), each with the time it was sent."""
        while self._due and self._due[0][0] <= now:
            time, number = heappop(self._due)
            self.arrived[number] = time
            self._queue.append(number)
        sent = []
        while self._queue and not self._is_full():
            number = self._queue.popleft()
            request = self._by_id[number]
            time = self.arrived[number] if self.max_concurrency is None else now
            if time != request.arrival:
                request = replace(request, arrival=time)
            self.sent[number] = time
            self._in_flight.add(number)
            sent.append(request)
        return sent

    def _is_full(self) -> bool:
        return self.max_concurrency is not None and len(self._in_flight) >= self.max_concurrency

    def ended(self, number: int, now: float, answered: bool = True) -> None:
        """Request ``number`` has its answer at ``now`` (s), or will never get one.

        A client that got no answer does not go on with its session.
        """
        self._in_flight.discard(number)
        if answered:
            for follower in self._followers.pop(number, ()):
                heappush(self._due, (now + self.after[follower][1], follower))

    def queued(self, number: int) -> float:
        """Client queue time: seconds from arrival at the client until it was sent."""
        return self.sent[number] - self.arrived[number]

    @property
    def unsent(self) -> list[Request]:
        """The requests that never reached the engine."""
        return [request for request in self.requests if request.id not in self.sent]
