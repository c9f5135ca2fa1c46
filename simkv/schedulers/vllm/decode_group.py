# mypyc: compile
"""Running requests of vLLM that decode in lockstep, and leaps, which compute several decode-only
steps at once.

One shared step counter advances the token counts of all requests in the group at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import accumulate, takewhile
from operator import attrgetter, itemgetter, sub

from mypy_extensions import mypyc_attr

from simkv.schedulers.vllm.memory import VllmMemory
from simkv.schedulers.vllm.request_state import RequestState


@mypyc_attr(allow_interpreted_subclasses=True, serializable=True)
class DecodeGroup:
    """Running requests that each compute one token per step.

    - ``scheduled``: number of steps scheduled for the group.
    - ``delivered``: number of steps whose tokens were delivered.
    - ``joined``, ``left``: ids of requests that entered or left since the last batch.
    """

    # With asynchronous scheduling, ``scheduled`` is one higher than ``delivered``. A member needs a
    # new KV block every ``block_size`` steps, when its computed tokens fill its blocks. The group
    # indexes its members by that step modulo ``block_size``, so a step visits only the members that
    # need a block.

    def __init__(self, memory: VllmMemory) -> None:
        self._memory = memory
        self.block_size = memory.block_size
        self.members: dict[int, RequestState] = {}
        self.scheduled = 0
        self.delivered = 0
        #: Total tokens with KV of all members.
        self.context = 0
        self.joined: list[int] = []
        self._newest: list[int] = []  # requests that joined in the previous batch
        self.left: list[int] = []
        # For each batch in flight: requests that have left the group since it was sent.
        self._left_since: deque[list[RequestState]] = deque()
        self._borders: list[dict[int, RequestState]] = [{} for _ in range(self.block_size)]
        self._stops: list[tuple[int, int, int]] = []

    def __len__(self) -> int:
        return len(self.members)

    def __contains__(self, r: RequestState) -> bool:
        return r.id in self.members

    def enter(self, r: RequestState) -> None:
        """Add a request that has only its next token to compute."""
        r.joined = self.scheduled
        self.members[r.id] = r
        self.context += r.computed
        self._border(r)[r.id] = r
        heappush(self._stops, (self._stop(r), r.id, r.joined))
        self.joined.append(r.id)

    def part(self, r: RequestState) -> None:
        """Remove the unfinished request ``r``."""
        # The tokens in flight of ``r`` are then delivered separately from the group.
        in_flight = self._remove(r)
        for late in list(self._left_since)[len(self._left_since) - in_flight :]:
            late.append(r)
        if r.id in self.joined:
            self.joined.remove(r.id)
        else:
            self.left.append(r.id)

    def drop(self, r: RequestState) -> None:
        """Remove ``r`` after its end."""
        self._remove(r)
        self.left.append(r.id)

    def depart(self) -> tuple[list[int], list[int]]:
        """Record that a batch with all members was scheduled.

        Returns two lists of ids: the requests that joined since the last batch, and the requests
        that left.
        """
        changes = self.joined, self.left
        self._newest = self.joined
        self.joined, self.left = [], []
        self._left_since.append([])
        if self.members:
            self._step(1)
        return changes

    def arrive(self) -> list[RequestState]:
        """Record the completion of the oldest batch.

        Returns the requests that left the group after the batch was scheduled.
        """
        return self._left_since.popleft()

    def in_flight(self, r: RequestState) -> int:
        """Return the number of tokens of ``r`` in the steps in flight."""
        return r.in_flight + self.scheduled - max(self.delivered, r.joined)

    def computed(self, r: RequestState) -> int:
        """Return the number of tokens of ``r`` whose KV is computed."""
        return r.computed + self.scheduled - r.joined

    def length(self, r: RequestState) -> int:
        """Return the number of prompt and output tokens of ``r``."""
        return r.length + max(self.delivered - r.joined, 0)

    def full_block_members(self, ahead: int = 0) -> dict[int, RequestState]:
        """Return the members whose blocks are full after ``ahead`` more steps, by request id."""
        return self._borders[(self.scheduled + ahead) % self.block_size]

    def stopped(self, steps: int) -> list[RequestState]:
        """Return the members that have reached ``stop_length`` after ``steps`` steps of the group.

        Each member is returned only once.
        """
        # The members stay in the group.
        found: list[RequestState] = []
        while (stop := self._next_stop()) is not None and stop <= steps:
            found.append(self.members[heappop(self._stops)[1]])
        return found

    def members_to_update(self) -> list[RequestState]:
        """Return the members for which this step allocates, frees or registers blocks."""
        found = self.full_block_members()
        for ahead in self._memory.aheads[1:]:
            if soon := self.full_block_members(ahead):
                found = found | soon
        rows = list(found.values())
        if self._memory.frees_while_running:
            # Prompt tokens of the newest members may have been in flight.
            new = (i for i in (*self.joined, *self._newest) if i in self.members and i not in found)
            rows += [self.members[i] for i in dict.fromkeys(new)]
        return rows

    def grow(self, r: RequestState, blocks: int) -> None:
        """Schedule the next token of a member and allocate ``blocks`` blocks for it."""
        computed = self.computed(r)
        if self._memory.frees_while_running:
            self._memory.free_unneeded(r, computed, self.in_flight(r))
        if blocks:
            self._memory.take(r, blocks, computed + 1)
        if self._memory.cache:
            self._memory.register(r, min(computed + 1, self.length(r)))

    def grow_all(self) -> None:
        """Schedule the next token of every member."""
        # Enough blocks must be free.
        if self._memory.tables is None:
            self._memory.pool.take(-1, len(self.full_block_members()))
            return
        members, rows = self.members_to_update(), self.full_block_members()
        if len(members) > 1:  # the order of block allocation affects the cache
            members.sort(key=attrgetter("order"))
        each = self._memory.blocks_to_grow(0, 1)
        for r in members:
            self.grow(r, each if r.id in rows else 0)

    def leap(self, most: int) -> int:
        """Return the number of steps, at most ``most``, until blocks run out or a member ends."""
        if self._memory.frees_while_running and self._newest:
            return 1
        stop = self._next_stop()
        if stop is not None:
            most = min(most, stop - self.scheduled + 1)
        free, each = self._memory.pool.free, self._memory.blocks_to_grow(0, 1)
        if free >= (most // self.block_size + 1) * len(self) * each:
            return most  # enough blocks for every member in every step
        taken = accumulate(self._growth(most - 1))
        return 1 + sum(1 for _ in takewhile(lambda blocks: blocks * each <= free, taken))

    def skip(self, steps: int) -> list[int]:
        """Simulate ``steps`` steps. Return the number of free blocks after each step."""
        memory, before = self._memory, self._memory.pool.free
        free: list[int] = []
        if memory.tables is None:
            free = list(accumulate(self._growth(steps), sub, initial=before))[1:]
            memory.pool.take(-1, before - free[-1])
            self.delivered += steps
            self._step(steps)
            return free
        if memory.fills_at_once and self._fill(steps):
            free = list(accumulate(self._growth(steps), sub, initial=before))[1:]
            self.delivered += steps
            self._step(steps)
            return free
        while steps:
            quiet = min(self._quiet(memory.aheads), steps)
            self.delivered += quiet or 1
            if not quiet:
                self.grow_all()
            self._step(quiet or 1)
            steps -= quiet or 1
            free += [memory.pool.free] * (quiet or 1)
        return free

    def _fill(self, steps: int) -> bool:
        """Allocate and register the blocks of the next ``steps`` steps at once.

        Returns False and does nothing if the result could differ from that of single steps.
        """
        pool = self._memory.cache
        assert pool is not None
        filled = self._filled(steps)
        if filled is None:
            return False
        keys = [r.keys[r.registered : end] for r, end in filled]
        if not pool.are_unused(keys):  # in this case the order of eviction and registration matters
            return False
        turns: list[int] = []  # every period of ``block_size`` steps is equal
        for step in range(min(self.block_size, steps)):
            rows = list(self.full_block_members(step).values())
            if len(rows) > 1:
                rows.sort(key=attrgetter("order"))
            turns += [r.id for r in rows]
        pool.take_in_turns(turns, sum(self._growth(steps)))
        for (r, end), new in zip(filled, keys, strict=True):
            pool.register_all(pool.tables[r.id][r.registered : end], new)
            r.registered = end
        return True

    def _filled(self, steps: int) -> list[tuple[RequestState, int]] | None:
        """Return the members that fill blocks in the next ``steps`` steps.

        Each member comes with its number of full blocks. Returns None if a member has full blocks
        that are not registered yet.
        """
        # Computes the cache keys of these blocks; new runs of keys are numbered in the order of the
        # steps.
        size, memory = self.block_size, self._memory
        filled: list[tuple[RequestState, int]] = []
        begun: list[tuple[int, int, RequestState, int]] = []
        for r in self.members.values():
            if r.content is None:
                continue
            computed = self.computed(r)
            # With asynchronous scheduling, the last token is known one step later.
            late = computed + 1 - (r.length + max(self.delivered + 1 - r.joined, 0))
            known = r.registered
            if late not in (0, 1) or (known + 1) * size < computed + 1 - late:
                return None
            end = (computed + steps - late) // size
            if end <= known:
                continue
            filled.append((r, end))
            for block in memory.new_runs(r, end):
                tokens = (block + 1) * size
                begun.append((tokens - 1 + late - computed, r.order, r, tokens))
        begun.sort(key=itemgetter(0, 1))
        for _, _, r, tokens in begun:
            memory.name(r, tokens)
        for r, end in filled:
            memory.name(r, end * size)
        return filled

    def _remove(self, r: RequestState) -> int:
        """Remove ``r`` and update its token counts. Return the number of its tokens in flight."""
        del self.members[r.id]
        del self._border(r)[r.id]
        steps = self.scheduled - r.joined
        delivered = max(self.delivered - r.joined, 0)
        r.computed += steps
        r.length += delivered
        r.placeholders += steps - delivered
        r.in_flight += steps - delivered
        self.context -= r.computed
        return steps - delivered

    def _step(self, steps: int) -> None:
        """Advance the token counts of all members by ``steps`` steps."""
        self.scheduled += steps
        self.context += steps * len(self.members)

    def _quiet(self, aheads: Sequence[int]) -> int:
        """Return the number of next steps in which no member needs a block.

        The result is at most ``block_size``.
        """
        # A step counts only if no member's blocks are full at any of the offsets ``aheads`` (in
        # steps) from it. The pattern repeats after ``block_size`` steps.
        borders, size = self._borders, self.block_size
        for step in range(size):
            for ahead in aheads:
                if borders[(self.scheduled + step + ahead) % size]:
                    return step
        return size

    def _growth(self, steps: int) -> list[int]:
        """Return the number of members that need a block in each of the next ``steps`` steps."""
        first = self.scheduled % self.block_size
        counts = list(map(len, self._borders))
        round_ = counts[first:] + counts[:first]
        return (round_ * (steps // self.block_size + 1))[:steps]

    def _next_stop(self) -> int | None:
        """Return the first step at which a member reaches ``stop_length``, or None without
        members.
        """
        stops = self._stops
        while stops:
            stop, i, joined = stops[0]
            if i in self.members and self.members[i].joined == joined:
                return stop
            heappop(stops)
        return None

    def _stop(self, r: RequestState) -> int:
        """Return the step of the group in which the last output token of ``r`` is scheduled."""
        return r.joined + r.stop_length - r.length - r.placeholders

    def _border(self, r: RequestState) -> dict[int, RequestState]:
        return self._borders[(r.joined - r.computed) % self.block_size]
