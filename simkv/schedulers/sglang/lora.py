"""LoRA in SGLang: which adapters may be in a batch, who makes room for whom, what is loaded.

The model without an adapter counts as one of them. Source: the wheels 0.5.15 to 0.5.23,
``managers/scheduler.py``, ``lora/lora_drainer.py``, ``lora/mem_pool.py``.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence

from simkv.schedulers.sglang.memory import Req

#: Requests join an adapter that drains if they ask for at most so many times its longest rest.
DRAIN_TOLERANCE = 1.2

AdapterName = str | None


class SglangLoras:
    """At most ``most`` adapters in a batch; with a ``threshold`` (s) above 0 they take turns."""

    def __init__(self, most: int, threshold: float) -> None:
        self.most = most
        self.drainer = LoraDrainer(most, threshold) if threshold > 0 else None
        self._used: set[AdapterName] = set()
        self._slots: OrderedDict[AdapterName, None] = OrderedDict()

    def begin(
        self, waiting: Sequence[Req], running: Sequence[Req], can: Sequence[Req], now: float
    ) -> None:
        """A pass looks at who is ``waiting``: ``running`` decode, ``can`` are chosen already."""
        if self.drainer:
            self.drainer.update(waiting, running, now)
        self._used = {r.lora for r in running if not r.finished} | {r.lora for r in can}

    def admit(self, r: Req) -> bool:
        """Whether the pass may look at this candidate."""
        if self.drainer and not self.drainer.admits(r):
            return False
        return r.lora in self._used or len(self._used) < self.most

    def note_candidate(self, r: Req) -> None:
        """A candidate was tried; its adapter counts in this pass even if it was not taken."""
        self._used.add(r.lora)

    def load(self, rows: Iterable[Req]) -> int:
        """How many adapters have to be copied to the GPU before ``rows`` run.

        The least recently used one makes room, the model without one last of all.
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
        """What of it decides who is taken in."""
        return self.drainer and tuple(self.drainer.draining.items())


class LoraDrainer:
    """Lets adapters drain for others that wait too long (sgl-project/sglang#17913).

    ``draining`` says which adapter takes in nobody new, and for whose sake. Of adapters that are
    equal in what decides, the engine takes any; here it is the first by name.
    """

    def __init__(self, most: int, threshold: float) -> None:
        self.most, self.threshold = most, threshold
        self.draining: dict[AdapterName, AdapterName] = {}
        self._rest: dict[AdapterName, int] = {}

    def update(self, waiting: Iterable[Req], running: Sequence[Req], now: float) -> None:
        """Look at who waits and who runs, at the time ``now`` (s)."""
        waits: dict[AdapterName, float] = {}
        for r in waiting:
            waits[r.lora] = max(waits.get(r.lora, 0.0), now - r.queued_at)
        self._rest = {}
        for r in running:
            self._rest[r.lora] = max(self._rest.get(r.lora, 0), r.max_new - r.out)
        if len(self._rest) >= self.most:
            self._choose(waits)
        self.draining = {a: b for a, b in self.draining.items() if a in self._rest}

    def _choose(self, waits: dict[AdapterName, float]) -> None:
        """For each adapter that has waited too long, let the one drain that will be done first."""
        served = set(self.draining.values())
        starving = [a for a, wait in waits.items() if wait > self.threshold and a not in served]
        starving.sort(key=lambda lora: (-waits[lora], lora or ""))
        eligible = sorted((a for a in self._rest if a not in self.draining), key=lambda a: a or "")
        for lora in starving:
            if not eligible:
                return
            first = min(eligible, key=self._rest.__getitem__)
            eligible.remove(first)
            if lora is not None:  # one that drains for the model itself takes in others still
                self.draining[first] = lora

    def admits(self, r: Req) -> bool:
        """Whether the adapter of ``r`` does not drain, or ``r`` is done about when it is."""
        if r.lora not in self.draining:
            return True
        return r.max_new <= self._rest.get(r.lora, 0) * DRAIN_TOLERANCE
