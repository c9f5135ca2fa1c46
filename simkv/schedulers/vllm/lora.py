"""LoRA adapters of vLLM: the maximum number per step, and their copies to the GPU.

Source: ``Scheduler.schedule`` (vllm/v1/core/sched/scheduler.py) and ``LRUCacheWorkerLoRAManager``
(vllm/lora/worker_manager.py), since 0.9.2.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable


class VllmLoras:
    """Adapters on the GPU and in host memory.

    At most ``most`` adapters run at a time. Host memory has space for ``kept`` adapters. The least
    recently used adapter is evicted first.
    """

    # The GPU has space for ``most`` adapters. An adapter that is evicted from host memory is also
    # removed from the GPU.

    def __init__(self, most: int, kept: int) -> None:
        self.most = most
        self._running: Counter[str] = Counter()
        self._used: set[str] = set()
        self._taken: list[str] = []
        self._slots, self._host = Lru(most), Lru(kept)

    def begin(self, sat_out: Iterable[str | None]) -> None:
        """Begin the admission phase of a step.

        ``sat_out`` are the adapters of running requests that the step skips. They do not count
        towards the maximum.
        """
        if self._running:
            out = Counter(lora for lora in sat_out if lora is not None)
            self._used = set(self._running - out)
        elif self._used:
            self._used = set()
        self._taken = []

    @property
    def exceeds_limit(self) -> bool:
        """Whether more than ``most`` adapters run.

        This happens when a skipped request runs again. An assertion in vLLM fails in this case.
        """
        return len(self._used) > self.most

    def admit(self, lora: str | None) -> bool:
        """Return whether this step can admit a request with the adapter ``lora``."""
        return lora is None or lora in self._used or len(self._used) < self.most

    def enter(self, lora: str | None) -> None:
        """Record that a request with the adapter ``lora`` starts to run."""
        if lora is not None:
            self._running[lora] += 1
            self._used.add(lora)
            self._taken.append(lora)

    def leave(self, lora: str | None) -> None:
        """Record that a request with the adapter ``lora`` stops running."""
        if lora is not None:
            self._running[lora] -= 1
            if not self._running[lora]:
                del self._running[lora]

    def load(self) -> tuple[int, int]:
        """Copy the adapters of the admitted requests to the GPU.

        Returns the number of adapters copied to the GPU and the number of adapters read from disk.
        """
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
    """Up to ``most`` names in the order of their last use."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._names: OrderedDict[str, None] = OrderedDict()

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def touch(self, name: str) -> None:
        """Mark a name as used if it is present."""
        if name in self._names:
            self._names.move_to_end(name)

    def add(self, name: str) -> str | None:
        """Add a name. Return the evicted name or None."""
        oldest = None
        if len(self._names) >= self._most:
            oldest, _ = self._names.popitem(last=False)
        self._names[name] = None
        return oldest

    def drop(self, name: str | None) -> None:
        """Remove a name if it is present."""
        self._names.pop(name or "", None)
