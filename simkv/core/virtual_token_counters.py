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
    """A waiting request: its client, its unique rank among requests with equal counters
    (``position``), and the amount that its admission adds to the counter (``charge``).
    """

    client: Client
    position: tuple[float, ...]
    charge: int


class VirtualTokenCounters:
    """Counters of the service that each client received; the queue first admits a request of the
    client with the least service.

    The tokens of a prompt are counted when its request is first admitted, and an output token when
    it is delivered. If a client without waiting requests sends a request, or if its request is
    preempted, its counter is raised to the smallest counter of the clients with waiting requests.
    If there are no such clients, it is raised to the counter of the client that left the queue
    last. A client therefore gains nothing from a time in which it sent nothing.

    ``emitted`` returns the number of output tokens that a request has received.
    """

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
        """Count a request that enters the waiting queue; if no other request of its client waits,
        raise the client's counter.
        """
        if not self._waiting[client]:
            others = [other for other, count in self._waiting.items() if count]
            least = min(map(self.value, others or [self._left_last]))
            self._settled[client] += max(0, least - self.value(client))
        self._waiting[client] += 1

    def leave(self, client: Client) -> None:
        """Count a request that leaves the waiting queue."""
        self._waiting[client] -= 1
        self._left_last = client

    def charge(self, request_id: int, client: Client, prompt_tokens: int) -> None:
        """Count the prompt of an admitted request, unless it was admitted before."""
        self._settled[client] += self.due(request_id, client, prompt_tokens)
        self._charged.setdefault(client, set()).add(request_id)

    def due(self, request_id: int, client: Client, prompt_tokens: int) -> int:
        """Return the amount, in weighted tokens, that the admission of a request adds to the
        counter of its client.
        """
        return 0 if request_id in self._charged.get(client, ()) else PROMPT_WEIGHT * prompt_tokens

    def end(self, request_id: int, client: Client) -> None:
        """Add the output tokens of a request that ends to the counter of its client.

        The method must be called while ``emitted`` still knows the request.
        """
        charged = self._charged.get(client, set())
        if request_id in charged:
            self._settled[client] += OUTPUT_WEIGHT * self._emitted(request_id)
            charged.remove(request_id)

    def order(
        self, waiting: Iterable[Waiting], entry: Callable[[Waiting], QueueEntry]
    ) -> list[Waiting]:
        """Return the waiting requests in the order in which they would be admitted if no further
        output token were delivered.
        """
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
        """Return the state that determines later orders, except for the numbers of delivered
        tokens.
        """
        return tuple(self._settled.items()), self._left_last
