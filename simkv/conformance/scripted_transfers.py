"""Completion of KV copies and transfers in a recording: after the number of steps in its header."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from simkv.core.recording_format import RecordingLine
from simkv.core.scheduler_protocol import Batch, DiskTransfers, KvCopies


def _take_due(due: dict[int, int], step: int) -> list[int]:
    """Remove the numbers that are due by ``step`` and return them in order."""
    numbers = sorted(number for number, last in due.items() if last <= step)
    for number in numbers:
        del due[number]
    return numbers


class ScriptedCopies:
    """Copies in which number ``n`` takes ``steps[n % len(steps)]`` steps.

    A load may finish in the step that starts it, a store in the next one. A copy that a step
    flushes finishes in that step.
    """

    def __init__(self, steps: Sequence[int]) -> None:
        self._steps = steps or [0]
        self._due: dict[int, int] = {}

    def begin(self, moves: KvCopies, step: int) -> None:
        """Start the copies of a batch."""
        for first, jobs in ((step, moves.loads), (step + 1, moves.stores)):
            for number, *_ in jobs:
                self._due[number] = first + self._steps[number % len(self._steps)]
        for number in moves.flush:
            self._due[number] = min(self._due[number], step)

    def done(self, step: int) -> list[int]:
        """Return the numbers of the copies reported with this step's batch, in order."""
        return _take_due(self._due, step)


class ScriptedDisk:
    """A disk whose transfer ``n`` finishes ``steps[n % len(steps)]`` steps after its request.

    A lookup takes the number of steps in ``looks`` and finishes after the transfers of its last
    step.
    """

    def __init__(self, steps: Sequence[int], looks: Sequence[int]) -> None:
        self._steps, self._delays = steps or [0], looks or [0]
        self._due: dict[int, int] = {}
        self._looks: dict[int, int] = {}

    def begin(self, moves: DiskTransfers, step: int) -> None:
        """Start the transfers and the lookup of a batch."""
        for move in (*moves.reads, *moves.writes):
            self._due[move.job] = step + self._steps[move.job % len(self._steps)]
        if moves.look:
            number = moves.look[0]
            self._looks[number] = step + self._delays[number % len(self._delays)]

    def done(self, step: int) -> tuple[list[int], list[int]]:
        """Return the numbers of transfers and lookups that finish before the next decision."""
        return _take_due(self._due, step), _take_due(self._looks, step)


class KvTransferHooks(Protocol):
    """Methods of a scheduler with a connector that receive transfer events; see ``KvConnector``."""

    sends: list[int]

    def keep(self, request_id: int) -> None: ...
    def fetch(self, request_id: int) -> None: ...
    def sent(self, request_id: int) -> None: ...
    def loaded(self, request_id: int) -> None: ...


class ScriptedTransfers:
    """Transfers in which number ``n``, in order of their start, takes ``steps[n % len(steps)]``
    steps.

    The loads of a step start before its sends, whose receiver is not simulated. Each may finish in
    the step that starts it. A load of 0 blocks only notifies the other side.
    """

    def __init__(self, steps: Sequence[int]) -> None:
        self._steps = steps or [0]
        self._count = 0
        self._loads: dict[int, int] = {}
        self._sends: dict[int, int] = {}

    def begin(self, loads: Sequence[tuple[int, int]], sends: Sequence[int], step: int) -> None:
        """Start loads, as (request id, blocks), and offer the blocks of requests in ``sends``."""
        loading = [i for i, much in loads if much]
        for due, ids in ((self._loads, loading), (self._sends, sends)):
            for i in ids:
                due[i] = step + self._steps[self._count % len(self._steps)]
                self._count += 1

    def done(self, step: int) -> tuple[list[int], list[int]]:
        """Return the request ids of loads and sends reported with this step's batch."""
        return _take_due(self._loads, step), _take_due(self._sends, step)


class ReplayedTransfers:
    """KV transfers during the replay of a recording; none if ``steps`` is None."""

    def __init__(self, scheduler: KvTransferHooks, steps: Sequence[int] | None) -> None:
        self._scheduler = scheduler
        self._script = None if steps is None else ScriptedTransfers(steps)

    def announce(self, request: RecordingLine) -> None:
        """Announce a request that is about to be added."""
        if kv := request.get("kv"):
            tell = {"send": self._scheduler.keep, "load": self._scheduler.fetch}[kv]
            tell(request["id"])

    def launch(self, batch: Batch, step: int) -> None:
        """Start the transfers of a step's batch."""
        if self._script:
            self._script.begin(batch.loads, self._scheduler.sends, step)

    def deliver(self, step: int) -> bool:
        """Deliver the transfers reported with a step's batch; return whether there were any."""
        if not self._script:
            return False
        loads, sends = self._script.done(step)
        for i in loads:
            self._scheduler.loaded(i)
        for i in sends:
            self._scheduler.sent(i)
        return bool(loads or sends)
