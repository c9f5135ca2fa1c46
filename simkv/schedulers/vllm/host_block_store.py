# mypyc: compile
"""KV blocks that vLLM holds in host memory, and their eviction.

Source: ``CPUOffloadingManager`` (vllm/v1/kv_offload/cpu/manager.py). The prefix-cache key of a
block identifies it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

from mypy_extensions import mypyc_attr

from simkv.schedulers.vllm.host_eviction import BEING_WRITTEN, BlockUses, build_eviction_policy
from simkv.schedulers.vllm.release_rules import VllmRules


@mypyc_attr(allow_interpreted_subclasses=True, serializable=True)
class HostBlockStore:
    """Host memory for ``capacity`` KV blocks.

    ``refs`` maps the key of each block to the number of transfers that are reading the block. The
    value is ``BEING_WRITTEN`` while the block is being written.
    """

    def __init__(self, capacity: int, policy: str, rules: VllmRules) -> None:
        self.capacity = capacity
        self.refs: dict[int, int] = {}
        self._idle = 0
        self._order = build_eviction_policy(policy, self.refs, capacity, rules)

    def read(self, keys: Sequence[int], first: int, uses: BlockUses) -> None:
        """Record the start of copies from host memory to the GPU.

        ``first`` is the position of the first block in the prompt.
        """
        # All ``keys`` must be present.
        self.pin(keys)
        self._note(keys, {key: first + i for i, key in enumerate(keys)}, uses)
        uses.reused.update(key for key in keys if key not in uses.inserted)

    def pin(self, keys: Iterable[int]) -> None:
        """Protect blocks from eviction while they are copied."""
        # The eviction policy does not count this as a use of the blocks.
        for key in keys:
            self._idle -= self.refs[key] == 0
            self.refs[key] += 1

    def complete_read(self, keys: Iterable[int]) -> None:
        """Record the completion of copies of the blocks ``keys`` from host memory."""
        for key in keys:
            self.refs[key] -= 1
            self._free(key)

    def write(self, keys: Sequence[int], first: int, uses: BlockUses) -> list[int] | None:
        """Allocate host memory for the blocks that are not present, and return their keys.

        ``first`` is the position of the first block in the prompt. Returns None if too few blocks
        can be evicted.
        """
        absent = [key for key in keys if key not in self.refs]
        there = [key for key in keys if self.refs.get(key, BEING_WRITTEN) != BEING_WRITTEN]
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
            self.refs[key] = BEING_WRITTEN
            self._order.insert(key, places[key], uses)
        uses.inserted.update(absent)
        return absent

    def complete_write(self, keys: Iterable[int]) -> None:
        """Record the completion of copies of the blocks ``keys`` to host memory."""
        for key in keys:
            self.refs[key] = 0
            self._free(key)

    def touch(self, keys: Sequence[int]) -> None:
        """Record that a request has looked up or stored blocks.

        ``keys`` are the keys of all full blocks of the request, in token order.
        """
        self._order.touch(keys)

    def over(self, uses: BlockUses) -> None:
        """Record the end of a request.

        The eviction policy then counts the request's blocks as used.
        """
        self._order.over(sorted(uses.seen, key=uses.seen.__getitem__), uses)

    def fingerprint(self) -> Hashable:
        """Return the state that determines which blocks host memory will contain."""
        return tuple(self.refs.items()), self._order.fingerprint()

    def _note(self, keys: Iterable[int], places: dict[int, int], uses: BlockUses) -> None:
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
