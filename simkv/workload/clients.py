"""Clients that send requests, including requests that wait for the end of earlier ones.

    clients = Clients(requests, after={1: (0, 2.5)}, max_concurrency=8)
    clients.send(0.0)        # requests that reach the engine now
    clients.ended(0, 3.0)    # request 0 has ended; request 1 arrives 2.5 s later
    clients.next_time()      # 5.5

This module has no clock: the engine loop passes the time. As in ``vllm bench serve``, an arrived
request waits in the client, in order of arrival, until fewer than ``max_concurrency`` requests are
in flight. Its TTFT counts from the time it is sent; the wait before that is its client queue time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from heapq import heapify, heappop, heappush

from simkv.core.request import Request

#: Id of the preceding request, and seconds between its end and the arrival of the next request.
Dependency = tuple[int, float]


class Clients:
    """Clients of a workload: they decide when each request is sent.

    ``after`` maps each dependent request to its preceding request and the think time in seconds.
    Requests not in ``after`` arrive at their own times.
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
        #: Times (s) at which each request arrived at its client and was sent.
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
        """Whether arrivals are independent of how requests are served."""
        return not self.after and self.max_concurrency is None

    def next_time(self) -> float | None:
        """Return the time of the next known arrival, or None."""
        return self._due[0][0] if self._due else None

    def send(self, now: float) -> list[Request]:
        """Return the requests that reach the engine at ``now`` (s), each with its send time."""
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
        """Record that request ``number`` ended at ``now`` (s), with or without an answer.

        Without an answer, the client does not continue its session.
        """
        self._in_flight.discard(number)
        if answered:
            for follower in self._followers.pop(number, ()):
                heappush(self._due, (now + self.after[follower][1], follower))

    def queued(self, number: int) -> float:
        """Return the client queue time: seconds between arrival at the client and sending."""
        return self.sent[number] - self.arrived[number]

    @property
    def unsent(self) -> list[Request]:
        """Requests that never reached the engine."""
        return [request for request in self.requests if request.id not in self.sent]
