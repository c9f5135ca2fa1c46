"""Order of SGLang's waiting queue."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from math import inf
from typing import Any

from simkv.core.radix_tree import RadixNode
from simkv.core.request import Segment
from simkv.core.virtual_token_counters import QueueEntry, VirtualTokenCounters
from simkv.schedulers.sglang.config import SchedulePolicy
from simkv.schedulers.sglang.loop_state import LoopState
from simkv.schedulers.sglang.memory import Req

#: Maximum queue length for prefix matching; for longer queues, lpm and hrrn use fcfs order.
MATCH_MAX = 128
#: The cached prefixes at the head of the queue are refreshed after this number of passes without
#: matching.
REFRESH_INTERVAL = 32
#: Policies that do not use the cache; without prefix caching, all other policies become fcfs.
CACHE_UNAWARE_POLICIES = ("fcfs", "lof", "routing-key", "vtc")


class QueueOrder:
    """Order of the waiting queue. Each pass sorts the queue again, starting from its previous
    order.

    - ``fcfs``: the queue is not sorted.
    - ``lof``: longest output limit first.
    - ``routing-key``: most common routing key among the running requests first.
    - ``lpm``: longest cached prefix first.
    - ``hrrn``: highest ratio of waiting time to uncached prompt tokens first. Waiting time is
      measured in tokens that the engine has processed.
    - ``vtc``: client with the least service first.
    - ``shortest-prefill-first``: fewest uncached tokens first.
    - ``dfs-weight``: depth-first order of the radix tree, child with the most requests first.

    With priorities, fcfs and lof sort by priority first. lpm, hrrn and shortest-prefill-first
    deprioritize requests that share their first tokens with another waiting request. With
    ``aging``, lpm adds ``aging`` tokens to the cached prefix for each pass in the queue
    (sgl-project/sglang#31723). Source: class SchedulePolicy in ``managers/schedule_policy.py``.
    """

    # A request is deprioritized for one pass if at most ``check`` of its tokens are cached and
    # another waiting request starts with the same ``deprioritize`` tokens. A retraction does not
    # reset the number of passes.

    def __init__(self, state: LoopState) -> None:
        config = state.config
        self.state = state
        policy = config.schedule_policy
        self.policy: SchedulePolicy = (
            policy if state.memory.tree or policy in CACHE_UNAWARE_POLICIES else "fcfs"
        )
        self.check = config.in_batch_prefix_caching_check_threshold
        self.deprioritize = config.in_batch_prefix_caching_deprioritize_threshold
        self.aging = config.lpm_aging_tokens_per_pass
        self.fcfs_passes = 0

    def sort(self) -> None:
        """Sort the queue in place."""
        # The cached prefixes that the order depends on are refreshed, too.
        waiting = self.state.waiting
        if self.aging:
            for r in waiting:
                r.passes += 1
        too_many = self.policy in ("lpm", "hrrn") and len(waiting) > MATCH_MAX
        if self.policy in CACHE_UNAWARE_POLICIES or too_many:
            self._without_matching(waiting)
            self._refresh(waiting)
        else:
            demoted = self._match(waiting)
            if self.policy == "dfs-weight":
                self._by_weight(waiting)
            else:
                waiting.sort(key=partial(SORT_KEYS[self.policy], self, demoted))

    def _longest_prefix(self, demoted: set[Req], r: Req) -> float:
        return inf if r in demoted else -(r.hit + self.aging * r.passes)

    def _response_ratio(self, demoted: set[Req], r: Req) -> tuple[float, int]:
        if r in demoted:
            return inf, r.id
        uncached = max(0, r.prompt_tokens - r.hit)
        if uncached == 0:
            return -inf, r.id
        return -(max(0, self.state.processed_tokens - r.stamp) / uncached), r.id

    def _shortest_prefill(self, demoted: set[Req], r: Req) -> tuple[bool, int, int]:
        return r in demoted, r.work, r.entry

    def _by_weight(self, waiting: list[Req]) -> None:
        """Sort by a post-order traversal of the tree, child with the most requests first."""
        ends: dict[RadixNode, list[Req]] = {}
        weights: Counter[RadixNode] = Counter()
        tree = self.state.memory.tree
        assert tree is not None
        for r in waiting:
            assert r.ended is not None
            ends.setdefault(r.ended, []).append(r)
            weights.update(tree.path_to_root(r.ended))
        waiting.clear()
        stack = [(tree.root, False)]
        while stack:
            node, seen = stack.pop()
            if seen:
                waiting += ends.get(node, ())
                continue
            children = [child for child in node.children.values() if child in weights]
            children.sort(key=weights.__getitem__, reverse=True)
            stack.append((node, True))
            stack += [(child, False) for child in reversed(children)]

    def _without_matching(self, waiting: list[Req]) -> None:
        """Sort by priority if enabled, then by arrival, output limit or routing key."""
        urgency, counts = self.state.urgency, self.state.config.enable_priority_scheduling
        if self.policy == "routing-key":
            self._by_key(waiting)
        elif counters := self.state.counters:
            waiting[:] = counters.order(waiting, partial(_queue_entry, counters))
        elif self.policy == "lof":
            waiting.sort(key=lambda r: (urgency(r) if counts else 0, -r.max_new))
        elif counts:
            waiting.sort(key=lambda r: (urgency(r), r.entry))

    def _by_key(self, waiting: list[Req]) -> None:
        """Sort by the frequency of the routing key among running requests."""
        keys = Counter(r.routing_key or "" for r in self.state.running.rows)
        del keys[""]
        if keys:
            waiting.sort(key=lambda r: (-keys[key := r.routing_key or ""], key))

    def _match(self, waiting: Sequence[Req]) -> set[Req]:
        """Record the cached tokens of every request; return the requests to deprioritize."""
        demoted: set[Req] = set()
        beginnings: set[tuple[Segment, ...]] = set()
        for r in waiting:
            matched, r.ended = self.state.memory.match(r, r.fill)
            r.hit = min(matched, r.max_cached_tokens)
            if matched <= self.check and r.fill >= self.deprioritize:
                # Two requests share at least `deprioritize` tokens if and only if their first
                # `deprioritize` tokens are equal.
                beginning = r.content.slices(0, self.deprioritize)
                if beginning in beginnings:
                    demoted.add(r)
                else:
                    beginnings.add(beginning)
        return demoted

    def _refresh(self, waiting: Sequence[Req]) -> None:
        """At intervals, refresh the cached prefixes of the requests at the head of the queue."""
        if self.state.memory.tree is None or not waiting or not self.state.rules.refreshes:
            return
        if self.fcfs_passes % REFRESH_INTERVAL == 0:
            for r in reversed(waiting[:MATCH_MAX]):
                self.state.memory.match(r, r.fill)
        self.fcfs_passes += 1

    def limit(self, chunked: Req, budget: int) -> int | None:
        """Return the maximum chunk size, or None if there is no limit.

        Only the policy shortest-prefill-first has a limit. The limit leaves some of the ``budget``
        tokens to shorter prompts.
        """
        page, reserved = self.state.memory.page_size, 0
        if self.policy != "shortest-prefill-first" or budget < 2 * page:
            return None
        for r in self.state.waiting:
            takes = self.state.memory.round_up(r.work)
            if r.work >= chunked.fill - chunked.prefix or reserved + takes > budget - page:
                break
            reserved += takes
        return (budget - reserved) // page * page if reserved else None

    def fingerprint(self) -> Hashable:
        """Return the state, other than the queue, that determines the next order."""
        tree = self.state.memory.tree
        siblings = tree.order() if tree and self.policy == "dfs-weight" else None
        return self.fcfs_passes % REFRESH_INTERVAL, siblings


def _queue_entry(counters: VirtualTokenCounters, r: Req) -> QueueEntry:
    due = counters.due(r.id, r.client, r.prompt_tokens)
    return QueueEntry(r.client, (r.entry,), due)


#: Sort keys of the policies that use the cache.
SORT_KEYS: Mapping[str, Callable[[QueueOrder, set[Req], Req], Any]] = {
    "lpm": QueueOrder._longest_prefix,
    "hrrn": QueueOrder._response_ratio,
    "shortest-prefill-first": QueueOrder._shortest_prefill,
}
