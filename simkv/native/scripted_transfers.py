"""KV copies and transfers in a replay; the header of the recording gives their durations in
steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from simkv.core.recording_format import RecordingLine
from simkv.core.scheduler_protocol import Batch, DiskTransfers, KvCopies


def _take_due(due: dict[int, int], step: int) -> list[int]:
    """Remove the keys whose value is at most ``step`` and return them sorted."""
    numbers = sorted(number for number, last in due.items() if last <= step)
    for number in numbers:
        del due[number]
    return numbers


class ScriptedCopies:
    """KV copies between GPU and host memory; copy ``n`` takes ``steps[n % len(steps)]`` steps.

    A copy to the GPU can finish in the step that starts it, and a copy to host memory in the next
    step.
    """

    def __init__(self, steps: Sequence[int]) -> None:
        self._steps = steps or [0]
        self._due: dict[int, int] = {}

    def begin(self, moves: KvCopies, step: int) -> None:
        """Start the copies that a batch requests, and finish the copies that it requires to be
        finished.
        """
        for first, jobs in ((step, moves.loads), (step + 1, moves.stores)):
            for number, *_ in jobs:
                self._due[number] = first + self._steps[number % len(self._steps)]
        for number in moves.flush:
            self._due[number] = min(self._due[number], step)

    def done(self, step: int) -> list[int]:
        """Return the sorted numbers of the copies that finish by ``step``."""
        return _take_due(self._due, step)


class ScriptedDisk:
    """KV transfers to and from a disk; transfer number ``n`` takes ``steps[n % len(steps)]`` steps.

    Lookup number ``n`` takes ``looks[n % len(looks)]`` steps. In a step, transfers finish before
    lookups.
    """

    def __init__(self, steps: Sequence[int], looks: Sequence[int]) -> None:
        self._steps, self._delays = steps or [0], looks or [0]
        self._due: dict[int, int] = {}
        self._looks: dict[int, int] = {}

    def begin(self, moves: DiskTransfers, step: int) -> None:
        """Start the disk transfers and the lookup that a batch requests."""
        for move in (*moves.reads, *moves.writes):
            self._due[move.job] = step + self._steps[move.job % len(self._steps)]
        if moves.look:
            number = moves.look[0]
            self._looks[number] = step + self._delays[number % len(self._delays)]

    def done(self, step: int) -> tuple[list[int], list[int]]:
        """Return the numbers of the transfers and of the lookups that finish before the next
        decision.
        """
        return _take_due(self._due, step), _take_due(self._looks, step)


class KvTransferHooks(Protocol):
    """Methods that inform a scheduler about KV transfers; see ``KvConnector``."""

    sends: list[int]

    def keep(self, request_id: int) -> None: ...
    def fetch(self, request_id: int) -> None: ...
    def sent(self, request_id: int) -> None: ...
    def loaded(self, request_id: int) -> None: ...


class ScriptedTransfers:
    """KV transfers between replicas; transfer ``n`` takes ``steps[n % len(steps)]`` steps.

    Transfers are numbered in the order of their start. A transfer can finish in the step that
    starts it.
    """

    def __init__(self, steps: Sequence[int]) -> None:
        self._steps = steps or [0]
        self._count = 0
        self._loads: dict[int, int] = {}
        self._sends: dict[int, int] = {}

    def begin(self, loads: Sequence[tuple[int, int]], sends: Sequence[int], step: int) -> None:
        """Start loads, given as (request id, number of blocks), and sends, given as request ids."""
        loading = [i for i, much in loads if much]
        for due, ids in ((self._loads, loading), (self._sends, sends)):
            for i in ids:
                due[i] = step + self._steps[self._count % len(self._steps)]
                self._count += 1

    def done(self, step: int) -> tuple[list[int], list[int]]:
        """Return the request ids of the loads and of the sends that finish by ``step``."""
        return _take_due(self._loads, step), _take_due(self._sends, step)


class ReplayedTransfers:
    """KV transfers between replicas during a replay; if ``steps`` is None, there are no
    transfers.
    """

    def __init__(self, scheduler: KvTransferHooks, steps: Sequence[int] | None) -> None:
        self._scheduler = scheduler
        self._script = None if steps is None else ScriptedTransfers(steps)

    def announce(self, request: RecordingLine) -> None:
        """Report to the scheduler, before a request is added, that its KV will be sent or
        loaded.
        """
        if kv := request.get("kv"):
            tell = {"send": self._scheduler.keep, "load": self._scheduler.fetch}[kv]
            tell(request["id"])

    def launch(self, batch: Batch, step: int) -> None:
        """Start the transfers of a batch."""
        if self._script:
            self._script.begin(batch.loads, self._scheduler.sends, step)

    def deliver(self, step: int) -> bool:
        """Report the transfers that finish by ``step`` to the scheduler; return whether any
        finished.
        """
        if not self._script:
            return False
        loads, sends = self._script.done(step)
        for i in loads:
            self._scheduler.loaded(i)
        for i in sends:
            self._scheduler.sent(i)
        return bool(loads or sends)
