"""vLLM's tier of files with its threads stopped: they work when a recording says so.

Manager, lookups, thread pool and input and output are the wheel's, unmodified, and so are the files
that they write and read, of ``BLOCK_BYTES`` bytes each. What is not theirs is when a thread takes
what is in its queue: a transfer and a lookup are carried out between two steps, as many steps after
they were asked for as the header's ``disk`` and ``looks`` say.
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
from simkv.conformance.scripted_copies import ScriptedDisk
from simkv.core.recording_format import RecordingLine
from simkv.core.scheduler_protocol import DiskTransfers, KvCopy

#: Bytes of a block, as far as anybody asks: a page, for files are read and written by pages.
BLOCK_BYTES = mmap.PAGESIZE
TIERING_PACKAGE = "vllm.v1.kv_offload.tiering."


class ThreadStub:
    """A thread that never starts."""

    def __init__(self, **_: object) -> None: ...

    def start(self) -> None:
        """Nothing."""


class ThreadWouldWait(Exception):
    """A thread would wait here."""


class ConditionStub:
    """A condition that nobody waits for."""

    def __init__(self, _: object = None) -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...

    def notify(self, _: int = 1) -> None:
        """Nobody waits."""

    notify_all = notify

    def wait_for(self, holds: Callable[[], object]) -> None:
        """Raises NothingToDo where a thread would wait."""
        if not holds():
            raise ThreadWouldWait


class SteppedDiskTier:
    """The tier of files behind a manager of host memory, in a folder of its own.

    ``given`` is what vLLM is told of it; ``attach`` says where it is.
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
        """This is the manager whose tier it is."""
        self._manager, (self._tier,) = manager, manager.secondary_tiers

    def begin(self, step: int) -> RecordingLine:
        """Take what was asked for since the step before, and do what is due; the fields of its
        line."""
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
        """How many of the blocks that a request loads were read for it, by vLLM's own count."""
        context = states[request].req_context
        sources = (str(self._manager.get_load_source(key, context)) for key in keys)
        return sum(source.lower().endswith("disk") for source in sources)

    def _look(self) -> tuple[int, int] | None:
        """The lookups that a step asks for: their number and of how many blocks."""
        try:
            batch = self._tier._lookup_manager._lookup_queue.get_nowait()
        except Empty:
            return None
        self._looks[self._looked] = batch
        self._looked += 1
        return self._looked - 1, len(batch)


def _run_dry(pool: Any) -> None:
    """Let a thread of the pool do all that is in its queues."""
    try:
        pool._worker(True)
    except ThreadWouldWait:
        return
