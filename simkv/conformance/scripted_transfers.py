"""When KV between replicas is there in a recording: after so many steps as its header says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from simkv.core.recording_format import RecordingLine
from simkv.core.scheduler_protocol import Batch


class KvTransferHooks(Protocol):
    """What a scheduler with a connector is told; see ``KvConnector``."""

    sends: list[int]

    def keep(self, request_id: int) -> None: ...
    def fetch(self, request_id: int) -> None: ...
    def sent(self, request_id: int) -> None: ...
    def loaded(self, request_id: int) -> None: ...


class ScriptedTransfers:
    """Transfer number ``n``, in the order in which they begin, takes ``steps[n % len(steps)]``.

    The loads of a step begin before the sends, whose other side is not there to be seen. Each may
    be done in the step that begins it. A load of nothing only lets the other side know.
    """

    def __init__(self, steps: Sequence[int]) -> None:
        self._steps = steps or [0]
        self._count = 0
        self._loads: dict[int, int] = {}
        self._sends: dict[int, int] = {}

    def begin(self, loads: Sequence[tuple[int, int]], sends: Sequence[int], step: int) -> None:
        """Requests whose KV is to be loaded, with how much, and whose blocks can be read."""
        loading = [i for i, much in loads if much]
        for due, ids in ((self._loads, loading), (self._sends, sends)):
            for i in ids:
                due[i] = step + self._steps[self._count % len(self._steps)]
                self._count += 1

    def done(self, step: int) -> tuple[list[int], list[int]]:
        """Loads and sends that the worker reports with the batch of this step, by their ids."""
        return _taken(self._loads, step), _taken(self._sends, step)


def _taken(due: dict[int, int], step: int) -> list[int]:
    ids = sorted(i for i, when in due.items() if when <= step)
    for i in ids:
        del due[i]
    return ids


class ReplayedTransfers:
    """The KV that comes and goes while a recording is replayed; none where ``steps`` is None."""

    def __init__(self, scheduler: KvTransferHooks, steps: Sequence[int] | None) -> None:
        self._scheduler = scheduler
        self._script = None if steps is None else ScriptedTransfers(steps)

    def announce(self, request: RecordingLine) -> None:
        """A request is about to be added."""
        if kv := request.get("kv"):
            tell = {"send": self._scheduler.keep, "load": self._scheduler.fetch}[kv]
            tell(request["id"])

    def launch(self, batch: Batch, step: int) -> None:
        """A batch of this step goes out."""
        if self._script:
            self._script.begin(batch.loads, self._scheduler.sends, step)

    def deliver(self, step: int) -> bool:
        """The batch of this step is back; whether any KV came or went."""
        if not self._script:
            return False
        loads, sends = self._script.done(step)
        for i in loads:
            self._scheduler.loaded(i)
        for i in sends:
            self._scheduler.sent(i)
        return bool(loads or sends)
