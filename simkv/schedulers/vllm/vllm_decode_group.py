"""Those of vLLM's running requests that decode in lockstep, and the steps that are leapt over."""

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
    """The decode group, with the blocks that it takes and what a batch is to say of it.

    All that the rules do to a member in a step is to give it one token, and a block if its blocks
    are full. ``joined`` and ``left`` are since the last batch.
    """

    def __init__(self, memory: VllmMemory) -> None:
        super().__init__(memory.block_size)
        self._memory = memory
        self.joined: list[int] = []
        self._newest: list[int] = []  # who had joined in the batch before
        self.left: list[int] = []
        # Per batch under way: requests that were in the group and have left it since.
        self._under_way: deque[list[RequestState]] = deque()

    def enter(self, r: RequestState) -> None:
        """Take ``r`` in, which has only its next token to compute."""
        self.join(r)
        self.joined.append(r.id)

    def part(self, r: RequestState) -> None:
        """Let ``r`` go; tokens under way will reach it by itself."""
        under_way = self.leave(r)
        for late in list(self._under_way)[len(self._under_way) - under_way :]:
            late.append(r)
        if r.id in self.joined:
            self.joined.remove(r.id)
        else:
            self.left.append(r.id)

    def drop(self, r: RequestState) -> None:
        """Let ``r`` go, which has ended."""
        self.leave(r)
        self.left.append(r.id)

    def depart(self) -> tuple[list[int], list[int]]:
        """A batch goes out with all members. Returns who has joined and who has left."""
        changes = self.joined, self.left
        self._newest = self.joined
        self.joined, self.left = [], []
        self._under_way.append([])
        if self.members:
            self.step()
        return changes

    def arrive(self) -> list[RequestState]:
        """The oldest batch is back. Returns who has left the group since it went out."""
        return self._under_way.popleft()

    def members_to_update(self) -> list[RequestState]:
        """Members of which more may become in this step than a token in blocks that they have."""
        found = self.full_block_members()
        for ahead in self._memory.aheads[1:]:
            if soon := self.full_block_members(ahead):
                found = found | soon
        rows = list(found.values())
        if (
            self._memory.frees_while_running
        ):  # of the newest, tokens of a prompt may have been under way
            new = (i for i in (*self.joined, *self._newest) if i in self.members and i not in found)
            rows += [self.members[i] for i in dict.fromkeys(new)]
        return rows

    def grow(self, r: RequestState, blocks: int) -> None:
        """The next token of a member, in new ``blocks`` if there are any."""
        computed = self.computed(r)
        if self._memory.frees_while_running:
            self._memory.free_unneeded(r, computed, self.in_flight(r))
        if blocks:
            self._memory.take(r, blocks, computed + 1)
        if self._memory.cache:
            self._memory.register(r, min(computed + 1, self.length(r)))

    def grow_all(self) -> None:
        """The next token of every member; the blocks for it are there."""
        if self._memory.tables is None:
            self._memory.pool.take(-1, len(self.full_block_members()))
            return
        members, rows = self.members_to_update(), self.full_block_members()
        if len(members) > 1:  # which block goes to whom shows in the cache, so their order counts
            members.sort(key=attrgetter("order"))
        each = self._memory.blocks_to_grow(0, 1)
        for r in members:
            self.grow(r, each if r.id in rows else 0)

    def leap(self, most: int) -> int:
        """For how many steps at most all can go on: until blocks run out or one is at its end."""
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
        """So many steps, one after the other. Returns the free blocks after each."""
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
