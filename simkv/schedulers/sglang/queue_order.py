"""The order in which SGLang's waiting queue is looked at."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from math import inf
from typing import Any

from simkv.core.radix_tree import RadixNode
from simkv.core.request import Segment
from simkv.schedulers.sglang.config import SchedulePolicy
from simkv.schedulers.sglang.loop_state import LoopState
from simkv.schedulers.sglang.memory import Req

#: A longer queue than this is not matched against the tree: the pass falls back to fcfs order.
MATCH_MAX = 128
#: Every so many passes in fcfs order refresh the cached prefixes of the head of the queue.
REFRESH_INTERVAL = 32
#: Policies that do not look into the cache; without one the others are fcfs.
CACHE_UNAWARE_POLICIES = ("fcfs", "lof", "routing-key")


class QueueOrder:
    """Sorts the waiting queue, for good: the next pass starts from this pass's order.

    ``fcfs`` sorts nothing, so a retracted request stays behind all that came before its
    retraction. ``lof`` puts the longest possible output first; with priorities both go by them
    before all else. ``routing-key`` puts first whose key most of the running requests have.
    ``lpm`` puts the longest cached prefix first. ``hrrn`` puts first who has waited longest for its
    uncached prompt tokens, the wait counted in tokens that the engine has processed.
    ``shortest-prefill-first`` puts first whose uncached tokens are fewest. These three send to the
    back, for this pass, a request with little in the cache whose beginning another request of the
    queue will bring (``check``, ``deprioritize``: the thresholds in tokens). ``dfs-weight`` walks
    the tree of what is cached. Source: ``managers/schedule_policy.py``, class SchedulePolicy.

    With ``aging`` (sgl-project/sglang#31723) lpm counts that many tokens more in the cache for each
    pass that a request has seen in the queue, so that one with nothing in it is not put last for
    ever. The count outlives a retraction.
    """

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
        """Order the queue in place; refreshes the cached prefixes that it looks at."""
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
        """Down the tree, into the child first in which most end; at a node its children first."""
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
        """By priority, if that counts, then by arrival, longest possible output or routing key."""
        urgency, counts = self.state.urgency, self.state.config.enable_priority_scheduling
        if self.policy == "routing-key":
            self._by_key(waiting)
        elif self.policy == "lof":
            waiting.sort(key=lambda r: (urgency(r) if counts else 0, -r.max_new))
        elif counts:
            waiting.sort(key=lambda r: (urgency(r), r.entry))

    def _by_key(self, waiting: list[Req]) -> None:
        """Whose routing key most of the running requests have; nobody moves if none has one."""
        keys = Counter(r.routing_key or "" for r in self.state.running.rows)
        del keys[""]
        if keys:
            waiting.sort(key=lambda r: (-keys[key := r.routing_key or ""], key))

    def _match(self, waiting: Sequence[Req]) -> set[Req]:
        """Note every request's cached tokens; return those that had better wait for another."""
        demoted: set[Req] = set()
        beginnings: set[tuple[Segment, ...]] = set()
        for r in waiting:
            matched, r.ended = self.state.memory.match(r, r.fill)
            r.hit = min(matched, r.max_cached_tokens)
            if matched <= self.check and r.fill >= self.deprioritize:
                # Two requests share `deprioritize` tokens or more iff their beginnings are equal.
                beginning = r.content.slices(0, self.deprioritize)
                if beginning in beginnings:
                    demoted.add(r)
                else:
                    beginnings.add(beginning)
        return demoted

    def _refresh(self, waiting: Sequence[Req]) -> None:
        """Now and then touch the prefixes that the head of the queue will need, its head last."""
        if self.state.memory.tree is None or not waiting or not self.state.rules.refreshes:
            return
        if self.fcfs_passes % REFRESH_INTERVAL == 0:
            for r in reversed(waiting[:MATCH_MAX]):
                self.state.memory.match(r, r.fill)
        self.fcfs_passes += 1

    def limit(self, chunked: Req, budget: int) -> int | None:
        """With shortest-prefill-first the most tokens of a chunk that leaves room for shorter ones.

        ``budget`` is what the pass may compute; None is no limit.
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
        """What of it decides the next order, beside the queue itself."""
        tree = self.state.memory.tree
        siblings = tree.order() if tree and self.policy == "dfs-weight" else None
        return self.fcfs_passes % REFRESH_INTERVAL, siblings


#: What a policy that looks into the cache sorts by.
SORT_KEYS: Mapping[str, Callable[[QueueOrder, set[Req], Req], Any]] = {
    "lpm": QueueOrder._longest_prefix,
    "hrrn": QueueOrder._response_ratio,
    "shortest-prefill-first": QueueOrder._shortest_prefill,
}
