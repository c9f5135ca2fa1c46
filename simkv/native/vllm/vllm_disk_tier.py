"""vLLM's disk tier without threads: transfers and lookups run between steps, when they are due.

The manager, lookups, thread pool and file I/O are the released code; the files are real.
"""

from __future__ import annotations

import importlib
import mmap
import threading
from collections.abc import Sequence
from queue import Empty
from tempfile import TemporaryDirectory
from typing import Any

from simkv.core.recording_format import RecordingLine
from simkv.core.scheduler_protocol import DiskTransfers, KvCopy
from simkv.native.import_stubs import ConfigStub
from simkv.native.scripted_transfers import ScriptedDisk

#: Bytes of a block: one memory page, because files are read and written in pages.
BLOCK_BYTES = mmap.PAGESIZE
TIERING_PACKAGE = "vllm.v1.kv_offload.tiering."


class IdleThread(threading.Thread):
    """A thread that never starts; ``SteppedDiskTier`` runs its work."""

    def start(self) -> None: ...


class ThreadWouldWait(Exception):
    """Raised if a thread would wait for work."""


class UnmetCondition(threading.Condition):
    """A condition that raises ThreadWouldWait instead of waiting."""

    def wait(self, timeout: float | None = None) -> bool:  # noqa: ARG002
        raise ThreadWouldWait


class SteppedDiskTier:
    """A disk tier in a temporary folder; ``given`` is its configuration for vLLM.

    Transfers and lookups take the numbers of steps ``steps`` and ``looks``. If ``steps`` is None,
    they end when ``finish`` is called. ``looked`` is the number of lookups so far.
    """

    def __init__(self, steps: Sequence[int] | None, looks: Sequence[int]) -> None:
        self._folder = TemporaryDirectory(prefix="simkv-")
        for module in ("async_lookup", "fs.thread_pool"):
            still = ConfigStub(Thread=IdleThread, Condition=UnmetCondition, Lock=threading.Lock)
            importlib.import_module(TIERING_PACKAGE + module).__dict__["threading"] = still
        tier = {"type": "fs", "root_dir": self._folder.name}
        self.given = {"spec_name": "TieringOffloadingSpec", "secondary_tiers": [tier]}
        self._script = None if steps is None else ScriptedDisk(steps, looks)
        self._transfers: dict[int, Any] = {}
        self._looks: dict[int, Any] = {}
        self.looked = 0

    def attach(self, manager: Any) -> None:
        """Connect to the manager of host memory that owns the tier."""
        self._manager, (self._tier,) = manager, manager.secondary_tiers

    def begin(self, step: int) -> RecordingLine:
        """Collect new transfers and lookups, run the due ones, and return a line's fields."""
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
        if self._script:
            self._script.begin(DiskTransfers(reads, writes, look), step)
            self.finish(*self._script.done(step))
        return {
            "reads": [[*move[:3]] for move in reads],
            "writes": [[*move[:3]] for move in writes],
            "look": look[1] if look else 0,
        }

    @property
    def pending_writes(self) -> int:
        """Number of writes that ``begin`` has not collected yet."""
        return len(self._tier._pool._store_q)

    def finish(self, transfers: Sequence[int], looks: Sequence[int]) -> None:
        """Run the transfers and lookups with these numbers."""
        pool = self._tier._pool
        started = [*pool._store_q]  # writes that ``begin`` has not collected yet
        pool._store_q.clear()
        for number in transfers:
            pool._load_q.append(self._transfers.pop(number))
            _run_dry(pool)
        pool._store_q.extend(started)
        for number in looks:
            queue = self._tier._lookup_manager._lookup_queue
            queue.put(self._looks.pop(number))
            queue.put(None)
            self._tier._lookup_manager._worker()

    def read_for(self, request: str, keys: Any, states: Any) -> int:
        """Return the number of a request's loaded blocks that vLLM read from disk."""
        context = states[request].req_context
        sources = (str(self._manager.get_load_source(key, context)) for key in keys)
        return sum(source.lower().endswith("disk") for source in sources)

    def _look(self) -> tuple[int, int] | None:
        """Return the number of a new lookup and the number of its blocks, or None."""
        try:
            batch = self._tier._lookup_manager._lookup_queue.get_nowait()
        except Empty:
            return None
        self._looks[self.looked] = batch
        self.looked += 1
        return self.looked - 1, len(batch)


def _run_dry(pool: Any) -> None:
    """Run the thread pool's loop until its queues are empty."""
    try:
        pool._worker(True)
    except ThreadWouldWait:
        return
