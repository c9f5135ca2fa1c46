"""LoRA in SGLang: the number of adapters per batch, draining of adapters, and loads to the GPU.

The base model counts as an adapter. Source: ``managers/scheduler.py``, ``lora/lora_drainer.py`` and
``lora/mem_pool.py`` of the wheels 0.5.15 to 0.5.23.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Mapping, Sequence

from simkv.schedulers.sglang.memory import Req

#: A draining adapter admits only requests whose output limit is at most this multiple of its
#: longest remaining output.
DRAIN_TOLERANCE = 1.2

AdapterName = str | None


class SglangLoras:
    """Admission of requests, limited by the number of their adapters.

    - ``most``: maximum number of adapters per batch.
    - ``threshold``: waiting time in seconds after which a running adapter is drained; 0 disables
      draining.
    """

    def __init__(self, most: int, threshold: float) -> None:
        self.most = most
        self.drainer = LoraDrainer(most, threshold) if threshold > 0 else None
        self._used: set[AdapterName] = set()
        self._slots: OrderedDict[AdapterName, None] = OrderedDict()

    def begin(
        self, waiting: Sequence[Req], running: Sequence[Req], can: Sequence[Req], now: float
    ) -> None:
        """Start an admission pass.

        The batch already contains the requests ``running`` and ``can``.
        """
        if self.drainer:
            self.drainer.update(waiting, running, now)
        self._used = {r.lora for r in running if not r.finished} | {r.lora for r in can}

    def admit(self, r: Req) -> bool:
        """Return whether ``r`` may join the batch with its adapter.

        The limit of adapters can prevent this, and so can the draining of its adapter.
        """
        if self.drainer and not self.drainer.admits(r):
            return False
        return r.lora in self._used or len(self._used) < self.most

    def note_candidate(self, r: Req) -> None:
        """Count the adapter of ``r`` in this pass.

        Due to a bug, the engine also counts the adapters of requests that it does not admit.
        """
        self._used.add(r.lora)

    def load(self, rows: Iterable[Req]) -> int:
        """Load the adapters of the requests ``rows``. Return the number of adapters copied to the
        GPU.

        The least recently used adapter is evicted first, the base model last.
        """
        batch, slots = {r.lora for r in rows}, self._slots
        ordered = sorted(batch, key=lambda lora: (lora is not None, lora or ""))
        for lora in ordered:
            if lora in slots:
                slots.move_to_end(lora)
        copied = 0
        for lora in ordered:
            if lora in slots:
                continue
            if len(slots) >= self.most:
                others = [other for other in slots if other not in batch]
                del slots[next((other for other in others if other is not None), None)]
            slots[lora] = None
            copied += lora is not None
        return copied

    def fingerprint(self) -> Hashable:
        """Return the state that determines which requests are admitted."""
        return self.drainer and tuple(self.drainer.draining.items())


class LoraDrainer:
    """Draining of running adapters when requests for another adapter wait too long.

    An adapter that is being drained admits no new requests. ``draining`` maps it to the adapter
    that replaces it. Source: sgl-project/sglang#17913.
    """

    # If several adapters are equally suitable, the engine's choice is arbitrary; this class chooses
    # the first by name.

    def __init__(self, most: int, threshold: float) -> None:
        self.most, self.threshold = most, threshold
        self.draining: dict[AdapterName, AdapterName] = {}
        self._rest: dict[AdapterName, int] = {}

    def update(self, waiting: Iterable[Req], running: Sequence[Req], now: float) -> None:
        """Update the set of draining adapters. ``now`` is the current time in seconds."""
        waits: dict[AdapterName, tuple[float, int]] = {}
        for r in waiting:
            # Of requests queued at the same time, the one queued first has waited longest.
            wait = now - r.queued_at, -r.entry
            waits[r.lora] = max(waits.get(r.lora, wait), wait)
        self._rest = {}
        for r in running:
            self._rest[r.lora] = max(self._rest.get(r.lora, 0), r.max_new - r.out)
        if len(self._rest) >= self.most:
            self._choose(waits)
        self.draining = {a: b for a, b in self.draining.items() if a in self._rest}

    def _choose(self, waits: Mapping[AdapterName, tuple[float, int]]) -> None:
        """For each adapter that waits too long, drain the running adapter that finishes first."""
        served = set(self.draining.values())
        starving = [a for a, wait in waits.items() if wait[0] > self.threshold and a not in served]
        starving.sort(key=waits.__getitem__, reverse=True)
        eligible = sorted((a for a in self._rest if a not in self.draining), key=lambda a: a or "")
        for lora in starving:
            if not eligible:
                return
            first = min(eligible, key=self._rest.__getitem__)
            eligible.remove(first)
            if lora is not None:  # admission continues if the adapter drains for the base model
                self.draining[first] = lora

    def admits(self, r: Req) -> bool:
        """Return whether ``r`` may start.

        While the adapter of ``r`` is draining, only requests with short outputs may start.
        """
        # "Short" means that the request is expected to end at about the same time as the running
        # requests of its adapter.
        if r.lora not in self.draining:
            return True
        return r.max_new <= self._rest.get(r.lora, 0) * DRAIN_TOLERANCE
