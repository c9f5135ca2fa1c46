"""vLLM's file tier with stopped threads, which run when a recording schedules them.

The manager, lookups, thread pool and file I/O are the wheel's, unmodified, and so are the files, of
``BLOCK_BYTES`` bytes each. Only the timing differs: a transfer or lookup runs between two steps,
the number of steps after its request that ``disk`` and ``looks`` of the header specify.
"""

from __future__ import annotations

import importlib
import mmap
import threading
from collections.abc import Callable, Sequence
from queue import Empty
from tempfile import TemporaryDirectory
from typing import Any

from simkv.conformance.record.import_stubs import ConfigStub
from simkv.conformance.scripted_transfers import ScriptedDisk
from simkv.core.recording_format import RecordingLine
from simkv.core.scheduler_protocol import DiskTransfers, KvCopy

#: Bytes of a block: one page, because files are read and written by pages.
BLOCK_BYTES = mmap.PAGESIZE
TIERING_PACKAGE = "vllm.v1.kv_offload.tiering."


class ThreadStub:
    """A thread that never starts."""

    def __init__(self, **_: object) -> None: ...

    def start(self) -> None:
        """Do nothing."""


class ThreadWouldWait(Exception):
    """Raised where a thread would wait."""


class ConditionStub:
    """A condition without waiting threads."""

    def __init__(self, _: object = None) -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...

    def notify(self, _: int = 1) -> None:
        """Do nothing: no thread waits."""

    notify_all = notify

    def wait_for(self, holds: Callable[[], object]) -> None:
        """Raise ThreadWouldWait where a thread would wait."""
        if not holds():
            raise ThreadWouldWait


class SteppedDiskTier:
    """The file tier behind a manager of host memory, in a temporary folder.

    ``given`` is its configuration for vLLM; ``attach`` connects it to the manager.
    """

    def __init__(self, steps: Sequence[int], looks: Sequence[int]) -> None:
        self._folder = TemporaryDirectory(prefix="simkv-")
        for module in ("async_lookup", "fs.thread_pool"):
            still = ConfigStub(Thread=ThreadStub, Condition=ConditionStub, Lock=threading.Lock)
            importlib.import_module(TIERING_PACKAGE + module).__dict__["threading"] = still
        tier = {"type": "fs", "root_dir": self._folder.name}
        self.given = {"spec_name": "TieringOffloadingSpec", "secondary_tiers": [tier]}
        self._script = ScriptedDisk(steps, looks)
        self._transfers: dict[int, Any] = {}
        self._looks: dict[int, Any] = {}
        self._looked = 0

    def attach(self, manager: Any) -> None:
        """Connect to the manager that owns the tier."""
        self._manager, (self._tier,) = manager, manager.secondary_tiers

    def begin(self, step: int) -> RecordingLine:
        """Collect new transfers and lookups, run those due, and return the line's fields."""
        pool = self._tier._pool
        tasks = [*pool._load_q, *pool._store_q]
        pool._load_q.clear()
        pool._store_q.clear()
        reads, writes = list[KvCopy](), list[KvCopy]()
        for task in tasks:
            number = task[1].job_id
            job = self._manager._jobs[number].transfer_job
            move = KvCopy(number, int(job.req_context.req_id), len(job.keys))
            (reads if job.is_promotion else writes).append(move)
            self._transfers[number] = task
        look = self._look()
        self._script.begin(DiskTransfers(reads, writes, look), step)
        transfers, looks = self._script.done(step)
        for number in transfers:
            pool._load_q.append(self._transfers.pop(number))
            _run_dry(pool)
        for number in looks:
            queue = self._tier._lookup_manager._lookup_queue
            queue.put(self._looks.pop(number))
            queue.put(None)
            self._tier._lookup_manager._worker()
        return {
            "reads": [[*move[:3]] for move in reads],
            "writes": [[*move[:3]] for move in writes],
            "look": look[1] if look else 0,
        }

    def read_for(self, request: str, keys: Any, states: Any) -> int:
        """Return the number of a request's loaded blocks that came from disk, as vLLM counts."""
        context = states[request].req_context
        sources = (str(self._manager.get_load_source(key, context)) for key in keys)
        return sum(source.lower().endswith("disk") for source in sources)

    def _look(self) -> tuple[int, int] | None:
        """Return the number and block count of the lookup that a step requests, or None."""
        try:
            batch = self._tier._lookup_manager._lookup_queue.get_nowait()
        except Empty:
            return None
        self._looks[self._looked] = batch
        self._looked += 1
        return self._looked - 1, len(batch)


def _run_dry(pool: Any) -> None:
    """Run a thread of the pool until its queues are empty."""
    try:
        pool._worker(True)
    except ThreadWouldWait:
        return
