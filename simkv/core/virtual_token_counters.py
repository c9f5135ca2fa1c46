"""Virtual token counters (VTC): a waiting queue that shares a server fairly among clients.

Source: Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024, arXiv 2401.00588,
Algorithm 2. No release of an engine has this policy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from heapq import heapify, heappop, heapreplace
from typing import NamedTuple, TypeVar

#: Weights of a prompt token and an output token (w_p and w_q in the paper).
PROMPT_WEIGHT, OUTPUT_WEIGHT = 1, 2

#: Name of a client; all requests without a client belong to the client None.
Client = str | None
Waiting = TypeVar("Waiting")


class QueueEntry(NamedTuple):
    """A waiting request.

    - ``position``: sort key among requests whose clients have equal counters.
    - ``charge``: weighted tokens that the admission adds to the client's counter.
    """

    client: Client
    position: tuple[float, ...]
    charge: int


class VirtualTokenCounters:
    """Counters of the service that each client has received, in weighted tokens.

    The client with the smallest counter is served first. When a client without waiting requests
    sends a request, its counter is raised to the smallest counter of the clients that wait. The
    function ``emitted`` returns the number of output tokens of a request.
    """

    # The tokens of a prompt are counted when its request is first admitted, and an output token
    # when it is delivered. The counter is also raised if a client without waiting requests has a
    # preempted request. If no other client waits, it is raised to the counter of the client that
    # left the queue last. A client therefore gains nothing from a time in which it sent nothing.

    def __init__(self, emitted: Callable[[int], int]) -> None:
        self._emitted = emitted
        # Counts of prompts, raised counters, and outputs of ended requests.
        self._settled: Counter[Client] = Counter()
        self._charged: dict[Client, set[int]] = {}
        self._waiting: Counter[Client] = Counter()
        self._left_last: Client = None

    def value(self, client: Client) -> int:
        """Return the counter of a client in weighted tokens."""
        outputs = sum(map(self._emitted, self._charged.get(client, ())))
        return self._settled[client] + OUTPUT_WEIGHT * outputs

    def enter(self, client: Client) -> None:
        """Count a request that enters the queue.

        The client's counter is raised if no other request of the client waits.
        """
        if not self._waiting[client]:
            others = [other for other, count in self._waiting.items() if count]
            least = min(map(self.value, others or [self._left_last]))
            self._settled[client] += max(0, least - self.value(client))
        self._waiting[client] += 1

    def leave(self, client: Client) -> None:
        """Count a request that leaves the queue."""
        self._waiting[client] -= 1
        self._left_last = client

    def charge(self, request_id: int, client: Client, prompt_tokens: int) -> None:
        """Add the prompt of an admitted request to its client's counter.

        A request that was admitted before is not counted again.
        """
        self._settled[client] += self.due(request_id, client, prompt_tokens)
        self._charged.setdefault(client, set()).add(request_id)

    def due(self, request_id: int, client: Client, prompt_tokens: int) -> int:
        """Return the weighted tokens that an admission adds to the client's counter."""
        return 0 if request_id in self._charged.get(client, ()) else PROMPT_WEIGHT * prompt_tokens

    def end(self, request_id: int, client: Client) -> None:
        """Add the output tokens of an ending request to its client's counter."""
        # The method must be called while ``emitted`` still knows the request.
        charged = self._charged.get(client, set())
        if request_id in charged:
            self._settled[client] += OUTPUT_WEIGHT * self._emitted(request_id)
            charged.remove(request_id)

    def order(
        self, waiting: Iterable[Waiting], entry: Callable[[Waiting], QueueEntry]
    ) -> list[Waiting]:
        """Return the waiting requests in the order of admission."""
        # The order holds if no further output token is delivered.
        queues: dict[Client, list[tuple[QueueEntry, Waiting]]] = {}
        for r in waiting:
            one = entry(r)
            queues.setdefault(one.client, []).append((one, r))
        heads: list[tuple[int, tuple[float, ...], list[tuple[QueueEntry, Waiting]]]] = []
        for client, rows in queues.items():
            rows.sort(key=lambda row: row[0].position, reverse=True)
            heads.append((self.value(client), rows[-1][0].position, rows))
        heapify(heads)
        found: list[Waiting] = []
        while heads:
            value, _, rows = heads[0]
            one, r = rows.pop()
            found.append(r)
            if rows:
                heapreplace(heads, (value + one.charge, rows[-1][0].position, rows))
            else:
                heappop(heads)
        return found

    def fingerprint(self) -> Hashable:
        """Return the state that determines later orders."""
        # The numbers of delivered tokens are not included.
        return tuple(self._settled.items()), self._left_last
