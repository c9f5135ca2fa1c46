# mypyc: compile
"""Eviction policies of vLLM for KV blocks in host memory.

Source: vllm/v1/kv_offload/cpu/policies/lru.py and ``arc.py``. In releases with the rule
``counts_uses_at_end``, all uses of a block by one request count as one use, at the end of the
request. In earlier releases, each lookup and each store of a request counts as a use of all its
blocks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Hashable, Iterable, Sequence
from heapq import heapify, heappop, heappush
from itertools import islice

from mypy_extensions import mypyc_attr

from simkv.schedulers.vllm.release_rules import VllmRules

#: Reference count of a block that is being written and cannot be read yet.
BEING_WRITTEN = -1


@mypyc_attr(allow_interpreted_subclasses=True, serializable=True)
class BlockUses:
    """Blocks in host memory that a request uses, by key.

    - ``seen``: position in the prompt of each block that the request has read or written.
    - ``inserted``: blocks that the request has written.
    - ``reused``: blocks that were in host memory before.
    - ``missed``: blocks that were absent when the request first looked them up.
    - ``rank``: position of the request if requests are sorted by their first use of a block; 0
      before this use.
    """

    # ``seen`` includes blocks that the request tried to write.

    def __init__(self) -> None:
        self.seen: dict[int, int] = {}
        self.inserted: set[int] = set()
        self.reused: set[int] = set()
        self.missed: set[int] = set()
        self.rank = 0


@mypyc_attr(allow_interpreted_subclasses=True, serializable=True)
class EvictionPolicy:
    """Base class of eviction policies.

    ``refs`` maps the key of each block to its number of copies in flight.
    """

    def __init__(self, refs: dict[int, int]) -> None:
        self._refs = refs

    def insert(self, key: int, place: int, uses: BlockUses) -> None:
        """Record that a block will be written.

        ``place`` is the position of the block in the prompt.
        """

    def missed(self, keys: Sequence[int]) -> None:
        """Record that a request has looked up blocks that are absent.

        Each block is reported only once per request.
        """

    def used(self, keys: Iterable[int], uses: BlockUses) -> None:
        """Record the first use of each block in ``keys`` by a request."""

    def touch(self, keys: Sequence[int]) -> None:
        """Record that a request looks up or stores blocks. ``keys`` are in token order."""

    def idle(self, key: int) -> None:
        """Record that a block has become evictable."""
        # Does nothing if a copy of the block is in flight.

    def over(self, keys: Sequence[int], uses: BlockUses) -> None:
        """Record the end of a request. ``keys`` are its blocks in prompt order."""

    def evict(self, count: int, spared: Collection[int]) -> list[int] | None:
        """Evict ``count`` blocks other than ``spared`` and return their keys in eviction order.

        Returns None and evicts nothing if fewer blocks are evictable.
        """
        raise NotImplementedError

    def fingerprint(self) -> Hashable:
        """Return the state that determines which blocks are evicted next."""
        raise NotImplementedError


@mypyc_attr(allow_interpreted_subclasses=True, serializable=True)
class LruPolicy(EvictionPolicy):
    """Least-recently-used eviction. The last block of a prompt is evicted before the first.

    With ``by_request``, all blocks of a request count as used when the request first used any
    block. Without ``by_request``, each block counts as used when it was written. When a request
    ends, all its blocks count as used once more.
    """

    def __init__(self, refs: dict[int, int], *, by_request: bool) -> None:
        super().__init__(refs)
        self._by_request = by_request
        self._ranks: dict[int, tuple[int, int]] = {}
        self._heap: list[tuple[tuple[int, int], int]] = []  # includes outdated entries
        self._newest = 0

    def insert(self, key: int, place: int, uses: BlockUses) -> None:
        if self._by_request:
            self._ranks[key] = self._rank(uses), -place
        else:
            self._newest += 1
            self._ranks[key] = self._newest, 0

    def used(self, keys: Iterable[int], uses: BlockUses) -> None:
        if not self._by_request:
            return
        first = self._rank(uses)
        for key in keys:
            rank = first, -uses.seen[key]
            if self._ranks.get(key, rank) < rank:
                self._ranks[key] = rank
                self.idle(key)

    def idle(self, key: int) -> None:
        if self._refs[key] == 0:
            heappush(self._heap, (self._ranks[key], key))
            if len(self._heap) > 64 + 4 * len(self._refs):
                self._heap = [(self._ranks[i], i) for i, refs in self._refs.items() if not refs]
                heapify(self._heap)

    def over(self, keys: Sequence[int], uses: BlockUses) -> None:  # noqa: ARG002
        for key in reversed(keys):
            if key in self._ranks:
                self._newest += 1
                self._ranks[key] = self._newest, 0
                self.idle(key)

    def evict(self, count: int, spared: Collection[int]) -> list[int] | None:
        chosen: dict[int, tuple[int, int]] = {}
        kept: list[tuple[tuple[int, int], int]] = []
        while self._heap and len(chosen) < count:
            rank, key = heappop(self._heap)
            if key in chosen or self._ranks.get(key) != rank or self._refs[key] != 0:
                continue
            if key in spared:
                kept.append((rank, key))
            else:
                chosen[key] = rank
        enough = len(chosen) == count
        for entry in kept if enough else [*kept, *((rank, key) for key, rank in chosen.items())]:
            heappush(self._heap, entry)
        if not enough:
            return None
        for key in chosen:
            del self._ranks[key]
        return list(chosen)

    def fingerprint(self) -> Hashable:
        """Return the keys of the blocks in eviction order."""
        return tuple(sorted(self._ranks, key=self._ranks.__getitem__))

    def _rank(self, uses: BlockUses) -> int:
        if not uses.rank:
            self._newest += 1
            uses.rank = self._newest
        return uses.rank


@mypyc_attr(allow_interpreted_subclasses=True, serializable=True)
class ArcPolicy(EvictionPolicy):
    """Adaptive replacement cache.

    One LRU list contains the blocks used once, another all other blocks.
    """

    # ``_recent`` are the blocks used once and ``_frequent`` the blocks used more often, each in the
    # order of use. ``_ghosts`` are the keys of blocks evicted from the two lists; a miss on such a
    # key shows that the block's list was too small. ``_target`` is the target length of
    # ``_recent``. With ``_either``, blocks of ``_recent`` can be evicted even if ``_recent`` is
    # shorter than this, provided that no block of ``_frequent`` can be evicted.

    def __init__(self, refs: dict[int, int], capacity: int, *, either: bool) -> None:
        super().__init__(refs)
        self._capacity, self._either = capacity, either
        self._target = 0.0
        self._recent: OrderedDict[int, None] = OrderedDict()
        self._frequent: OrderedDict[int, None] = OrderedDict()
        self._ghosts: tuple[OrderedDict[int, None], OrderedDict[int, None]]
        self._ghosts = OrderedDict(), OrderedDict()

    def insert(self, key: int, place: int, uses: BlockUses) -> None:  # noqa: ARG002
        self._recent[key] = None
        for ghosts in self._ghosts:
            ghosts.pop(key, None)

    def missed(self, keys: Sequence[int]) -> None:
        once, often = self._ghosts
        for key in reversed(keys):
            if key in once:
                step = max(1.0, len(often) / len(once))
                self._target = min(self._target + step, float(self._capacity))
                once.move_to_end(key)
            elif key in often:
                step = max(1.0, len(once) / len(often))
                self._target = max(self._target - step, 0.0)
                often.move_to_end(key)

    def over(self, keys: Sequence[int], uses: BlockUses) -> None:
        once = uses.inserted - uses.reused
        for key in reversed(keys):
            if key in once:
                for order in (self._recent, self._frequent):
                    if key in order:
                        order.move_to_end(key)
            elif key in uses.reused and key in self._recent:
                del self._recent[key]
                self._frequent[key] = None
            elif key in uses.reused and key in self._frequent:
                self._frequent.move_to_end(key)

    def evict(self, count: int, spared: Collection[int]) -> list[int] | None:
        orders = [
            iter([key for key in order if self._refs[key] == 0 and key not in spared])
            for order in (self._recent, self._frequent)
        ]
        left, chosen = len(self._recent), list[tuple[int, int]]()
        for _ in range(count):
            turns: tuple[int, ...] = (0, 1)
            if left < int(self._target):
                turns = (1, 0) if self._either else (1,)
            found = next(((key, i) for i in turns for key in islice(orders[i], 1)), None)
            if found is None:
                return None
            chosen.append(found)
            left -= found[1] == 0
        for key, i in chosen:
            del (self._recent, self._frequent)[i][key]
            self._ghosts[i][key] = None
        for ghosts in self._ghosts:
            while len(ghosts) > self._capacity:
                ghosts.popitem(last=False)
        return [key for key, _ in chosen]

    def fingerprint(self) -> Hashable:
        orders = (self._recent, self._frequent, *self._ghosts)
        return self._target, *(tuple(order) for order in orders)


@mypyc_attr(allow_interpreted_subclasses=True, serializable=True)
class TouchLruPolicy(EvictionPolicy):
    """Least-recently-used eviction, where each lookup, store and copy of a block is a use."""

    def __init__(self, refs: dict[int, int]) -> None:
        super().__init__(refs)
        self._order: OrderedDict[int, None] = OrderedDict()  # includes blocks that are being copied

    def touch(self, keys: Sequence[int]) -> None:
        for key in reversed(keys):
            if self._refs.get(key) == 0:
                self._order.move_to_end(key)

    def idle(self, key: int) -> None:
        if self._refs[key] == 0:
            self._order[key] = None
            self._order.move_to_end(key)

    def evict(self, count: int, spared: Collection[int]) -> list[int] | None:
        idle = (key for key in self._order if self._refs[key] == 0 and key not in spared)
        chosen = list(islice(idle, count))
        if len(chosen) < count:
            return None
        for key in chosen:
            del self._order[key]
        return chosen

    def fingerprint(self) -> Hashable:
        return tuple(self._order)


@mypyc_attr(allow_interpreted_subclasses=True, serializable=True)
class TouchArcPolicy(ArcPolicy):
    """Adaptive replacement cache, where each lookup and store of a block is a use."""

    # A touch of a block that is being written is not a further use.

    def missed(self, keys: Sequence[int]) -> None:
        """Do nothing, because ``touch`` already adapts the target length."""

    def touch(self, keys: Sequence[int]) -> None:
        for key in reversed(keys):
            if key in self._recent and self._refs[key] == BEING_WRITTEN:
                self._recent.move_to_end(key)
            elif key in self._recent:
                del self._recent[key]
                self._frequent[key] = None
            elif key in self._frequent:
                self._frequent.move_to_end(key)
            else:
                super().missed([key])

    def over(self, keys: Sequence[int], uses: BlockUses) -> None:
        """Do nothing, because ``touch`` already counts uses."""


def build_eviction_policy(
    policy: str, refs: dict[int, int], capacity: int, rules: VllmRules
) -> EvictionPolicy:
    """Build the eviction policy ``lru`` or ``arc`` with the rules of a release."""
    if policy == "arc":
        arc = ArcPolicy if rules.counts_uses_at_end else TouchArcPolicy
        return arc(refs, capacity, either=rules.evicts_used_once)
    if rules.counts_uses_at_end:
        return LruPolicy(refs, by_request=rules.ranks_by_request)
    return TouchLruPolicy(refs)
