"""Clients that send requests, including requests that wait for the end of earlier requests.

    clients = Clients(requests, after={1: Dependency((0,), 2.5)}, max_concurrency=8)
    clients.send(0.0)        # requests that reach the engine now
    clients.ended(0, 3.0)    # request 0 has ended; request 1 arrives 2.5 s later
    clients.next_time()      # 5.5

This module has no clock: the engine loop passes the current time to each call. As in ``vllm bench
serve``, an arrived request waits in the client, in order of arrival, until fewer than
``max_concurrency`` requests are in flight. Its TTFT counts from the time at which it is sent; its
wait in the client is the client queue time. Requests that depend on each other form a session. With
``max_sessions``, a new session waits until fewer than this number of sessions are in progress. This
wait is not part of the client queue time.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from simkv.core.request import Request


class Dependency(NamedTuple):
    """Requests whose answers a request waits for, and the delay after the last answer.

    - ``before``: ids of the awaited requests.
    - ``think_time``, ``tool_time``: parts of the delay in seconds.
    - ``first_wins``: whether the request waits only for the first answer. The other requests are
      then cancelled.
    """

    # Requests that are needed only by cancelled requests are cancelled, too.

    before: tuple[int, ...]
    think_time: float
    tool_time: float = 0.0
    first_wins: bool = False

    @property
    def delay(self) -> float:
        """Seconds from the last answer to the arrival of the request."""
        return self.think_time + self.tool_time


def find_sessions(after: Mapping[int, Dependency]) -> dict[int, int]:
    """Return the session of each request that has dependencies, in either direction.

    Requests that depend on each other form a session. A session is identified by the id of one of
    its requests.
    """
    parents: dict[int, int] = {}

    def root(number: int) -> int:
        path = []
        while (parent := parents.setdefault(number, number)) != number:
            path.append(number)
            number = parent
        parents.update(dict.fromkeys(path, number))
        return number

    for number, dependency in after.items():
        first = root(dependency.before[0])
        for other in (*dependency.before[1:], number):
            parents[root(other)] = first
    return {number: root(number) for number in parents}


class Clients:
    """Clients of a workload, which decide when each request is sent.

    - ``after``: dependency of each request that waits for others.
    - ``max_concurrency``: maximum number of requests in flight.
    - ``max_sessions``: maximum number of sessions in progress.
    """

    # Requests not in ``after`` arrive at their own times. A session ends when none of its requests
    # has a known future arrival, waits in the client or is in flight.

    def __init__(
        self,
        requests: Sequence[Request],
        after: Mapping[int, Dependency] | None = None,
        max_concurrency: int | None = None,
        max_sessions: int | None = None,
    ) -> None:
        self.requests = list(requests)
        self.after = dict(after or {})
        self.max_concurrency = max_concurrency
        self.max_sessions = max_sessions
        #: Times (s) at which each request arrived at its client, started and was sent. A request
        #: starts at its arrival, or when ``max_sessions`` allows its session to start.
        self.arrived: dict[int, float] = {}
        self.started: dict[int, float] = {}
        self.sent: dict[int, float] = {}
        #: Requests that are not needed any more, because another branch has ended first.
        self.cancelled: set[int] = set()
        self._leaving: list[int] = []
        self._ended: set[int] = set()
        self._by_id = {request.id: request for request in requests}
        self._followers: dict[int, list[int]] = {}
        #: Number of answers for which each dependent request still waits.
        self._missing: dict[int, int] = {}
        for number, dependency in self.after.items():
            self._missing[number] = len(dependency.before)
            for before in dependency.before:
                self._followers.setdefault(before, []).append(number)
        self._session = {} if max_sessions is None else find_sessions(self.after)
        #: Sessions in progress, each with its number of requests due, waiting or in flight.
        self._active: dict[int, int] = {}
        #: Requests whose sessions have not started, by session, in order of arrival.
        self._held: OrderedDict[int, list[int]] = OrderedDict()
        self._due = [(r.arrival, r.id) for r in requests if r.id not in self.after]
        heapify(self._due)
        self._queue: deque[int] = deque()
        self._in_flight: set[int] = set()

    @property
    def open(self) -> bool:
        """Whether arrivals do not depend on how requests are served."""
        return not self.after and self._unlimited

    @property
    def _unlimited(self) -> bool:
        return self.max_concurrency is None and self.max_sessions is None

    def next_time(self) -> float | None:
        """Return the time of the next known arrival (s), or None."""
        while self._due and self._due[0][1] in self.cancelled:
            heappop(self._due)
        return self._due[0][0] if self._due else None

    def send(self, now: float) -> list[Request]:
        """Return the requests that reach the engine at ``now`` (s)."""
        while self._due and self._due[0][0] <= now:
            time, number = heappop(self._due)
            if number in self.cancelled:
                continue
            self.arrived[number] = time
            if self._begins(number, time):
                self._queue.append(number)
        sent = []
        while self._queue and not self._is_full():
            number = self._queue.popleft()
            if number in self.cancelled:
                continue
            request = self._by_id[number]
            time = self.arrived[number] if self._unlimited else now
            if time != request.arrival:
                request = replace(request, arrival=time)
            self.sent[number] = time
            self._in_flight.add(number)
            sent.append(request)
        return sent

    def _is_full(self) -> bool:
        return self.max_concurrency is not None and len(self._in_flight) >= self.max_concurrency

    def ended(self, number: int, now: float, answered: bool = True) -> None:
        """Record that request ``number`` ended at ``now`` (s).

        If ``answered`` is false, the requests that wait for its answer are not sent.
        """
        self._in_flight.discard(number)
        self._ended.add(number)
        if answered:
            self.cancelled.discard(number)  # it ended at the same time as the other branch
            for follower in self._followers.get(number, ()):
                if not self._missing[follower] or follower in self.cancelled:
                    continue  # another branch has ended first
                dependency = self.after[follower]
                self._missing[follower] -= 1
                if dependency.first_wins:
                    self._missing[follower] = 0
                if not self._missing[follower]:
                    heappush(self._due, (now + dependency.delay, follower))
                    self._count(follower, 1, now)
                if dependency.first_wins:
                    self._cancel((i for i in dependency.before if i != number), now)
        self._count(number, -1, now)

    def take_cancelled(self) -> list[int]:
        """Return the requests in flight that were cancelled since the last call."""
        leaving, self._leaving = self._leaving, []
        return [number for number in leaving if number in self._in_flight]

    def _cancel(self, branches: Iterable[int], now: float) -> None:
        """Cancel requests that no other request waits for, and the requests that only they need."""
        for number in branches:
            if number in self._ended or number in self.cancelled or self._is_needed(number):
                continue
            self.cancelled.add(number)
            if number in self._in_flight:
                self._leaving.append(number)
            elif number in self.started or self._missing.get(number) == 0:  # in the queue, or due
                self._count(number, -1, now)
            if number in self.after:
                self._cancel(self.after[number].before, now)

    def _is_needed(self, number: int) -> bool:
        """Return whether a request that has not started waits for request ``number``."""
        followers = self._followers.get(number, ())
        return any(self._missing[one] and one not in self.cancelled for one in followers)

    def _begins(self, number: int, now: float) -> bool:
        """Start an arrived request if its session is in progress or may start; hold it otherwise.

        Return whether the request started.
        """
        if self.max_sessions is not None and number not in self.after:
            session = self._session.get(number, number)
            if session not in self._active and len(self._active) >= self.max_sessions:
                self._held.setdefault(session, []).append(number)
                return False
            self._count(number, 1, now)
        self.started[number] = now
        return True

    def _count(self, number: int, change: int, now: float) -> None:
        """Change the number of unfinished requests of the session of request ``number``."""
        # If the session ends, the next one starts.
        if self.max_sessions is None:
            return
        session = self._session.get(number, number)
        self._active[session] = self._active.get(session, 0) + change
        if not self._active[session]:
            del self._active[session]
            while self._held and len(self._active) < self.max_sessions:
                _, held = self._held.popitem(last=False)
                for one in held:
                    if one not in self.cancelled and self._begins(one, now):
                        self._queue.append(one)

    def queued(self, number: int) -> float:
        """Return the client queue time in seconds.

        A request is in the queue from its start until it is sent. It starts at its arrival, or when
        ``max_sessions`` allows its session to start.
        """
        return self.sent[number] - self.started[number]

    @property
    def unsent(self) -> list[Request]:
        """Requests that never reached the engine."""
        return [request for request in self.requests if request.id not in self.sent]
