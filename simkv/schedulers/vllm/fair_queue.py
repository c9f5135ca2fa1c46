"""vLLM scheduler with a waiting queue that is fair to clients (policy ``vtc``).

Only the order of the waiting queue differs from fcfs. No release of vLLM has this policy.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping

from simkv.core.virtual_token_counters import (
    OUTPUT_WEIGHT,
    Client,
    QueueEntry,
    VirtualTokenCounters,
)
from simkv.schedulers.vllm.config import VllmConfig
from simkv.schedulers.vllm.release_rules import VllmRules
from simkv.schedulers.vllm.request_state import PriorityQueue, RequestState
from simkv.schedulers.vllm.schedule_step import ScheduleStep
from simkv.schedulers.vllm.scheduler import AdmissionStep, VllmScheduler


class VllmFairScheduler(VllmScheduler):
    """Scheduler that admits the requests of the least served client first."""

    # If VllmScheduler is compiled, copies must include the attributes of this class.
    __mypyc_attrs__ = (*getattr(VllmScheduler, "__mypyc_attrs__", ()), "__dict__")

    def __init__(
        self, config: VllmConfig, rules: VllmRules | None = None, *, tables: bool = False
    ) -> None:
        super().__init__(config, rules, tables=tables)
        self.counters = VirtualTokenCounters(self._emitted)
        self.waiting: FairQueue = FairQueue(self.counters)

    def _emitted(self, request_id: int) -> int:
        r = self._live[request_id]
        length = self.decoding.length(r) if r in self.decoding else r.length
        return length - r.prompt.prompt_tokens

    def _consider(self, r: RequestState, step: ScheduleStep) -> AdmissionStep:
        turn = super()._consider(r, step)
        if turn == "is taken":
            self.counters.charge(r.id, r.prompt.client, r.prompt.prompt_tokens)
        return turn

    def _remove(self, r: RequestState) -> None:
        self.counters.end(r.id, r.prompt.client)
        super()._remove(r)

    def leap(self, most: int) -> int:
        """Return the number of decode-only steps, as ``VllmScheduler.leap`` does."""
        # The leap ends before another request becomes the head of the waiting queue.
        steps = super().leap(most)
        if steps == 1 or not self.waiting:
            return steps
        decoding = Counter(r.prompt.client for r in self.decoding.members.values())
        return 1 + self.waiting.steps_with_same_head(decoding, steps - 1)

    def fingerprint(self) -> Hashable:
        return super().fingerprint(), tuple(self.waiting_ids()), self.counters.fingerprint()


class FairQueue(PriorityQueue):
    """Waiting requests in the order of the virtual token counters of their clients.

    Ties are broken by arrival time.
    """

    # If PriorityQueue is compiled, copies must include the attributes of this class.
    __mypyc_attrs__ = (*getattr(PriorityQueue, "__mypyc_attrs__", ()), "__dict__")

    def __init__(self, counters: VirtualTokenCounters) -> None:
        super().__init__()
        self._counters = counters
        self._of: dict[Client, list[RequestState]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._of.values()))

    def __iter__(self) -> Iterator[RequestState]:
        waiting = (r for requests in self._of.values() for r in requests)
        return iter(self._counters.order(waiting, self._entry))

    def head(self) -> RequestState:
        return self._of[self._next_client()][0]

    def steps_with_same_head(self, decoding: Mapping[Client, int], most: int) -> int:
        """Return the number of steps, at most ``most``, until the head of the queue changes.

        ``decoding`` is the number of output tokens per step, by client.
        """
        first = self._next_client()
        least, position = self._counters.value(first), _position(self._of[first][0])
        for client, requests in self._of.items():
            closer = OUTPUT_WEIGHT * (decoding.get(first, 0) - decoding.get(client, 0))
            if closer > 0:
                steps, rest = divmod(self._counters.value(client) - least, closer)
                most = min(most, steps - (not rest and _position(requests[0]) < position))
        return most

    def add(self, r: RequestState) -> None:
        self._counters.enter(r.prompt.client)
        self._insert(r)

    def put_back(self, r: RequestState) -> None:
        self.add(r)

    def remove(self, r: RequestState) -> None:
        self._take(r)
        self._counters.leave(r.prompt.client)

    def set_aside(self, r: RequestState) -> None:
        self._take(r)
        self._aside.append(r)

    def restore_aside(self) -> list[RequestState]:
        aside, self._aside = self._aside, []
        for r in aside:
            self._insert(r)
        return aside

    def _insert(self, r: RequestState) -> None:
        insort(self._of.setdefault(r.prompt.client, []), r, key=_position)

    def _take(self, r: RequestState) -> None:
        requests = self._of[r.prompt.client]
        requests.remove(r)
        if not requests:
            del self._of[r.prompt.client]

    def _next_client(self) -> Client:
        value = self._counters.value
        return min(self._of, key=lambda client: (value(client), _position(self._of[client][0])))

    def _entry(self, r: RequestState) -> QueueEntry:
        due = self._counters.due(r.id, r.prompt.client, r.prompt.prompt_tokens)
        return QueueEntry(r.prompt.client, _position(r), due)


def _position(r: RequestState) -> tuple[float, int]:
    return r.prompt.arrival, r.id
