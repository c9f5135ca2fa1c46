"""LoRA adapters: how many may run beside each other, and which of them have to be loaded.

The rules are those of ``Scheduler.schedule`` (vllm/v1/core/sched/scheduler.py) and of
``LRUCacheWorkerLoRAManager`` (vllm/lora/worker_manager.py), 0.9.2 to 0.33.0.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable


class VllmLoras:
    """The adapters of running requests, and those that are on the GPU and in host memory.

    At most ``most`` run at a time and as many have room on the GPU; ``kept`` have room in host
    memory. The least recently used one makes room; who leaves the host leaves the GPU too.
    """

    def __init__(self, most: int, kept: int) -> None:
        self.most = most
        self._running: Counter[str] = Counter()
        self._used: set[str] = set()
        self._taken: list[str] = []
        self._slots, self._host = Lru(most), Lru(kept)

    def begin(self, sat_out: Iterable[str | None]) -> None:
        """Those who run have their tokens of this step; adapters of those that ``sat_out`` do not
        count in it."""
        if self._running:
            out = Counter(lora for lora in sat_out if lora is not None)
            self._used = set(self._running - out)
        elif self._used:
            self._used = set()
        self._taken = []

    @property
    def exceeds_limit(self) -> bool:
        """Whether one that sat out while another came is back: vLLM asserts that none is."""
        return len(self._used) > self.most

    def admit(self, lora: str | None) -> bool:
        """Whether a request with this adapter may be taken into this step."""
        return lora is None or lora in self._used or len(self._used) < self.most

    def enter(self, lora: str | None) -> None:
        """A request with this adapter runs from now on."""
        if lora is not None:
            self._running[lora] += 1
            self._used.add(lora)
            self._taken.append(lora)

    def leave(self, lora: str | None) -> None:
        """A request with this adapter runs no more."""
        if lora is not None:
            self._running[lora] -= 1
            if not self._running[lora]:
                del self._running[lora]

    def load(self) -> tuple[int, int]:
        """How many adapters have to be copied to the GPU for those whom this step took in, and how
        many of these read into host memory before. They are there from now on."""
        if not self._taken:
            return 0, 0
        for lora in self._running:
            self._slots.touch(lora)
            self._host.touch(lora)
        copied = read = 0
        for lora in self._taken:
            if lora not in self._host:
                read += 1
                self._slots.drop(self._host.add(lora))
            if lora not in self._slots:
                copied += 1
                self._slots.add(lora)
        return copied, read


class Lru:
    """Names in the order of their last use, at most ``most`` of them."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._names: OrderedDict[str, None] = OrderedDict()

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def touch(self, name: str) -> None:
        """It is used, if it is there."""
        if name in self._names:
            self._names.move_to_end(name)

    def add(self, name: str) -> str | None:
        """It is there from now on; returns who had to make room, if anybody."""
        oldest = None
        if len(self._names) >= self._most:
            oldest, _ = self._names.popitem(last=False)
        self._names[name] = None
        return oldest

    def drop(self, name: str | None) -> None:
        """It is there no more."""
        self._names.pop(name or "", None)
