"""vLLM's blocks of KV in host memory: which are there, and which make room for others.

Rules of ``CPUOffloadingManager`` (vllm/v1/kv_offload/cpu/manager.py) and of its policies
(``cpu/policies/lru.py`` and ``arc.py``). A block is named by its key of the prefix cache; a
request's uses of it count once, when the request is over.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Hashable, Iterable, Sequence
from heapq import heapify, heappop, heappush
from itertools import islice

from mypy_extensions import mypyc_attr

from simkv.schedulers.vllm.rules import VllmRules

#: A block that is being written: nobody can read it yet.
WRITTEN = -1


@mypyc_attr(allow_interpreted_subclasses=True, serializable=True)
class Uses:
    """What a request has to do with blocks in host memory, by key.

    ``seen`` are those that it has read, written or offered, with their places in its prompt; of
    these it has ``inserted`` some, ``reused`` others that were there, and ``missed`` some that were
    not. ``rank`` is its place in an order of uses, 0 until it has one.
    """

    def __init__(self) -> None:
        self.seen: dict[int, int] = {}
        self.inserted: set[int] = set()
        self.reused: set[int] = set()
        self.missed: set[int] = set()
        self.rank = 0


@mypyc_attr(allow_interpreted_subclasses=True, serializable=True)
class LruOrder:
    """Who was used longest ago goes first; of the blocks of one request its last one.

    While a request is there its blocks have the rank of its first use, or where rules do not rank
    requests (``by_request``) that of their being written; when it is over each gets a new one.
    """

    def __init__(self, refs: dict[int, int], *, by_request: bool) -> None:
        self._refs, self._by_request = refs, by_request
        self._ranks: dict[int, tuple[int, int]] = {}
        self._heap: list[tuple[tuple[int, int], int]] = []  # with entries that hold no more
        self._newest = 0

    def insert(self, key: int, place: int, uses: Uses) -> None:
        """A block is about to be written."""
        if self._by_request:
            self._ranks[key] = self._rank(uses), -place
        else:
            self._newest += 1
            self._ranks[key] = self._newest, 0

    def missed(self, keys: Sequence[int]) -> None:
        """These are not there, and are asked for the first time by a request."""

    def used(self, keys: Iterable[int], uses: Uses) -> None:
        """A request uses these for the first time."""
        if not self._by_request:
            return
        first = self._rank(uses)
        for key in keys:
            rank = first, -uses.seen[key]
            if self._ranks.get(key, rank) < rank:
                self._ranks[key] = rank
                self.idle(key)

    def idle(self, key: int) -> None:
        """A block may have to make room now, unless it is being copied."""
        if self._refs[key] == 0:
            heappush(self._heap, (self._ranks[key], key))
            if len(self._heap) > 64 + 4 * len(self._refs):
                self._heap = [(self._ranks[i], i) for i, refs in self._refs.items() if not refs]
                heapify(self._heap)

    def over(self, keys: Sequence[int], uses: Uses) -> None:  # noqa: ARG002
        """A request that had to do with ``keys``, in the order of its prompt, is over."""
        for key in reversed(keys):
            if key in self._ranks:
                self._newest += 1
                self._ranks[key] = self._newest, 0
                self.idle(key)

    def evict(self, count: int, spared: Collection[int]) -> list[int] | None:
        """``count`` blocks that make room, in order; None, and nothing happens, if they do not."""
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
        """What decides who makes room next: the order, not the ranks."""
        return tuple(sorted(self._ranks, key=self._ranks.__getitem__))

    def _rank(self, uses: Uses) -> int:
        if not uses.rank:
            self._newest += 1
            uses.rank = self._newest
        return uses.rank


@mypyc_attr(allow_interpreted_subclasses=True, serializable=True)
class ArcOrder:
    """Blocks used once (``recent``) and more often (``frequent``), each in the order of uses.

    The ``ghosts`` of those that made room say which of the two was too small: ``target`` is how
    many blocks used once are to stay.
    """

    def __init__(self, refs: dict[int, int], capacity: int) -> None:
        self._refs, self._capacity = refs, capacity
        self._target = 0.0
        self._recent: OrderedDict[int, None] = OrderedDict()
        self._frequent: OrderedDict[int, None] = OrderedDict()
        self._ghosts: tuple[OrderedDict[int, None], OrderedDict[int, None]]
        self._ghosts = OrderedDict(), OrderedDict()

    def insert(self, key: int, place: int, uses: Uses) -> None:  # noqa: ARG002
        """A block is about to be written."""
        self._recent[key] = None
        for ghosts in self._ghosts:
            ghosts.pop(key, None)

    def missed(self, keys: Sequence[int]) -> None:
        """These are not there, and are asked for the first time by a request."""
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

    def used(self, keys: Iterable[int], uses: Uses) -> None:
        """A request uses these for the first time; that counts when it is over."""

    def idle(self, key: int) -> None:
        """A block may have to make room now."""

    def over(self, keys: Sequence[int], uses: Uses) -> None:
        """A request that had to do with ``keys``, in the order of its prompt, is over."""
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
        """``count`` blocks that make room, in order; None, and nothing happens, if they do not."""
        orders = [
            iter([key for key in order if self._refs[key] == 0 and key not in spared])
            for order in (self._recent, self._frequent)
        ]
        left, chosen = len(self._recent), list[tuple[int, int]]()
        for _ in range(count):
            turns = (0, 1) if left >= int(self._target) else (1, 0)
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
        """What decides who makes room next."""
        orders = (self._recent, self._frequent, *self._ghosts)
        return self._target, *(tuple(order) for order in orders)


@mypyc_attr(allow_interpreted_subclasses=True, serializable=True)
class HostBlockStore:
    """``capacity`` blocks in host memory, and by the key of each who reads it.

    ``refs`` counts the copies under way from a block to the GPU; one that is being written has
    ``WRITTEN``.
    """

    def __init__(self, capacity: int, policy: str, rules: VllmRules) -> None:
        self.capacity = capacity
        self.refs: dict[int, int] = {}
        self._idle = 0
        self._order: ArcOrder | LruOrder
        if policy == "arc":
            self._order = ArcOrder(self.refs, capacity)
        else:
            self._order = LruOrder(self.refs, by_request=rules.ranks_requests)

    def read(self, keys: Sequence[int], first: int, uses: Uses) -> None:
        """Blocks from the ``first`` of a prompt on, which are there, are copied to the GPU."""
        for key in keys:
            self._idle -= self.refs[key] == 0
            self.refs[key] += 1
        self._note(keys, {key: first + i for i, key in enumerate(keys)}, uses)
        uses.reused.update(key for key in keys if key not in uses.inserted)

    def was_read(self, keys: Iterable[int]) -> None:
        """The copies are done."""
        for key in keys:
            self.refs[key] -= 1
            self._free(key)

    def write(self, keys: Sequence[int], first: int, uses: Uses) -> list[int] | None:
        """Which blocks of a prompt from its ``first`` on are to be copied here: those that are not.

        They have room from now on. None, if they cannot have it.
        """
        absent = [key for key in keys if key not in self.refs]
        there = [key for key in keys if self.refs.get(key, WRITTEN) != WRITTEN]
        if new := [key for key in absent if key not in uses.missed]:
            self._order.missed(new)
            uses.missed.update(new)
        counted = {*absent, *there}
        places = {key: first + i for i, key in enumerate(keys) if key in counted}
        self._note(places, places, uses)
        uses.reused.update(key for key in there if key not in uses.inserted)
        if absent and not self._make_room(len(absent), keys):
            return None
        for key in absent:
            self.refs[key] = WRITTEN
            self._order.insert(key, places[key], uses)
        uses.inserted.update(absent)
        return absent

    def was_written(self, keys: Iterable[int]) -> None:
        """The copies are done."""
        for key in keys:
            self.refs[key] = 0
            self._free(key)

    def over(self, uses: Uses) -> None:
        """A request is over: its uses count now."""
        self._order.over(sorted(uses.seen, key=uses.seen.__getitem__), uses)

    def fingerprint(self) -> Hashable:
        """What decides what is there later."""
        return tuple(self.refs.items()), self._order.fingerprint()

    def _note(self, keys: Iterable[int], places: dict[int, int], uses: Uses) -> None:
        if new := [key for key in keys if key not in uses.seen]:
            for key in new:
                uses.seen[key] = places[key]
            self._order.used(new, uses)

    def _free(self, key: int) -> None:
        if self.refs[key] == 0:
            self._idle += 1
            self._order.idle(key)

    def _make_room(self, count: int, spared: Sequence[int]) -> bool:
        lacking = count - (self.capacity - len(self.refs))
        if lacking <= 0:
            return True
        if lacking > self._idle:
            return False
        gone = self._order.evict(lacking, set(spared))
        for key in gone or ():
            del self.refs[key]
        self._idle -= len(gone or ())
        return gone is not None
