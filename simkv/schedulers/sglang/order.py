"""The order in which SGLang's waiting queue is looked at."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from math import inf

from simkv.core.request import Segment
from simkv.schedulers.sglang.config import Policy
from simkv.schedulers.sglang.memory import Req
from simkv.schedulers.sglang.state import LoopState

#: A longer queue than this is not matched against the tree: the pass falls back to fcfs order.
MATCH_MAX = 128
#: Every so many passes in fcfs order refresh the cached prefixes of the head of the queue.
REFRESH_INTERVAL = 32


class QueueOrder:
    """Sorts the waiting queue, for good: the next pass starts from this pass's order.

    ``fcfs`` sorts nothing, so a retracted request stays behind all that came before its
    retraction. ``lof`` puts the longest possible output first; with priorities both go by them
    before all else. ``lpm`` puts the longest cached prefix first. ``hrrn`` puts first who has
    waited longest for its uncached prompt tokens, the wait counted in tokens that the engine has
    processed. These two send to the back, for this pass, a request with little in the cache whose
    beginning another request of the queue will bring (``check``, ``deprioritize``: the thresholds
    in tokens). Source: ``managers/schedule_policy.py``, class SchedulePolicy.

    With ``aging`` (sgl-project/sglang#31723) lpm counts that many tokens more in the cache for each
    pass that a request has seen in the queue, so that one with nothing in it is not put last for
    ever. The count outlives a retraction.
    """

    def __init__(self, state: LoopState) -> None:
        config = state.config
        self.state = state
        policy = config.schedule_policy
        self.policy: Policy = policy if state.memory.tree or policy == "lof" else "fcfs"
        self.check = config.in_batch_prefix_caching_check_threshold
        self.deprioritize = config.in_batch_prefix_caching_deprioritize_threshold
        self.aging = config.lpm_aging_tokens_per_pass
        self.fcfs_passes = 0

    def sort(self) -> None:
        """Order the queue in place; refreshes the cached prefixes that it looks at."""
        waiting, processed_tokens = self.state.waiting, self.state.processed_tokens
        if self.aging:
            for r in waiting:
                r.passes += 1
        if self.policy in ("fcfs", "lof") or len(waiting) > MATCH_MAX:
            self._without_matching(waiting)
            self._refresh(waiting)
            return
        demoted = self._match(waiting)

        def by_hit(r: Req) -> float:
            return inf if r in demoted else -(r.hit + self.aging * r.passes)

        def by_response_ratio(r: Req) -> tuple[float, int]:
            if r in demoted:
                return inf, r.id
            uncached = max(0, r.prompt_tokens - r.hit)
            if uncached == 0:
                return -inf, r.id
            return -(max(0, processed_tokens - r.stamp) / uncached), r.id

        if self.policy == "lpm":
            waiting.sort(key=by_hit)
        else:
            waiting.sort(key=by_response_ratio)

    def _without_matching(self, waiting: list[Req]) -> None:
        """By priority, if that counts, then by arrival or by the longest possible output."""
        urgency, counts = self.state.urgency, self.state.config.enable_priority_scheduling
        if self.policy == "lof":
            waiting.sort(key=lambda r: (urgency(r) if counts else 0, -r.max_new))
        elif counts:
            waiting.sort(key=lambda r: (urgency(r), r.entry))

    def _match(self, waiting: Sequence[Req]) -> set[Req]:
        """Note every request's cached tokens; return those that had better wait for another."""
        demoted: set[Req] = set()
        beginnings: set[tuple[Segment, ...]] = set()
        for r in waiting:
            matched, _ = self.state.memory.match(r, r.fill)
            r.hit = min(matched, r.fill - 1)
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

    def fingerprint(self) -> Hashable:
        """What of it decides the next order, beside the queue itself."""
        return self.fcfs_passes % REFRESH_INTERVAL
