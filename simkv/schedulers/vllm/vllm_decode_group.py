# mypyc: compile
"""Running requests of vLLM that decode in lockstep, and the steps skipped by a leap."""

from __future__ import annotations

from collections import deque
from itertools import accumulate, takewhile
from operator import attrgetter, sub

from mypy_extensions import mypyc_attr

from simkv.schedulers.decode_group import DecodeGroup
from simkv.schedulers.vllm.memory import VllmMemory
from simkv.schedulers.vllm.request_state import RequestState


@mypyc_attr(allow_interpreted_subclasses=True, serializable=True)
class VllmDecodeGroup(DecodeGroup[RequestState]):
    """Decode group with its block allocations and its changes per batch.

    In each step a member gets one token, and a block if its blocks are full. ``joined`` and
    ``left`` list the changes since the last batch.
    """

    def __init__(self, memory: VllmMemory) -> None:
        super().__init__(memory.block_size)
        self._memory = memory
        self.joined: list[int] = []
        self._newest: list[int] = []  # requests that joined in the previous batch
        self.left: list[int] = []
        # For each batch in flight: requests of the group that have left it since.
        self._under_way: deque[list[RequestState]] = deque()

    def enter(self, r: RequestState) -> None:
        """Add ``r``, which has only its next token to compute."""
        self.join(r)
        self.joined.append(r.id)

    def part(self, r: RequestState) -> None:
        """Remove ``r``; its tokens in flight are delivered individually."""
        under_way = self.leave(r)
        for late in list(self._under_way)[len(self._under_way) - under_way :]:
            late.append(r)
        if r.id in self.joined:
            self.joined.remove(r.id)
        else:
            self.left.append(r.id)

    def drop(self, r: RequestState) -> None:
        """Remove ``r``, which has ended."""
        self.leave(r)
        self.left.append(r.id)

    def depart(self) -> tuple[list[int], list[int]]:
        """Send a batch with all members. Returns the ids of requests that joined and of requests
        that left."""
        changes = self.joined, self.left
        self._newest = self.joined
        self.joined, self.left = [], []
        self._under_way.append([])
        if self.members:
            self.step()
        return changes

    def arrive(self) -> list[RequestState]:
        """Receive the oldest batch. Returns the requests that left the group after it was sent."""
        return self._under_way.popleft()

    def members_to_update(self) -> list[RequestState]:
        """Return the members that need more in this step than one token in an existing block."""
        found = self.full_block_members()
        for ahead in self._memory.aheads[1:]:
            if soon := self.full_block_members(ahead):
                found = found | soon
        rows = list(found.values())
        if (
            self._memory.frees_while_running
        ):  # prompt tokens of the newest members may have been in flight
            new = (i for i in (*self.joined, *self._newest) if i in self.members and i not in found)
            rows += [self.members[i] for i in dict.fromkeys(new)]
        return rows

    def grow(self, r: RequestState, blocks: int) -> None:
        """Add the next token of a member, with ``blocks`` new blocks."""
        computed = self.computed(r)
        if self._memory.frees_while_running:
            self._memory.free_unneeded(r, computed, self.in_flight(r))
        if blocks:
            self._memory.take(r, blocks, computed + 1)
        if self._memory.cache:
            self._memory.register(r, min(computed + 1, self.length(r)))

    def grow_all(self) -> None:
        """Add the next token of every member; enough blocks are free."""
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
        stop = self.next_stop()
        if stop is not None:
            most = min(most, stop - self.scheduled + 1)
        free, each = self._memory.pool.free, self._memory.blocks_to_grow(0, 1)
        if free >= (most // self.block_size + 1) * len(self) * each:
            return most  # enough for every member at every border
        taken = accumulate(self.growth(most - 1))
        return 1 + sum(1 for _ in takewhile(lambda blocks: blocks * each <= free, taken))

    def skip(self, steps: int) -> list[int]:
        """Run ``steps`` steps, one after the other. Returns the number of free blocks after
        each."""
        memory, before = self._memory, self._memory.pool.free
        free: list[int] = []
        if memory.tables is None:
            free = list(accumulate(self.growth(steps), sub, initial=before))[1:]
            memory.pool.take(-1, before - free[-1])
            self.delivered += steps
            self.step(steps)
            return free
        while steps:
            quiet = min(self.quiet(memory.aheads), steps)
            self.delivered += quiet or 1
            if not quiet:
                self.grow_all()
            self.step(quiet or 1)
            steps -= quiet or 1
            free += [memory.pool.free] * (quiet or 1)
        return free
