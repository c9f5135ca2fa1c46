"""vLLM's blocks of KV on disk, behind host memory: what is looked for, read and written.

Rules of ``TieringOffloadingManager`` (vllm/v1/kv_offload/tiering/manager.py, 0.33.0) with one tier
of files (``tiering/fs/manager.py``, ``tiering/async_lookup.py``), by their defaults: all that comes
to host memory from the GPU is written on, nothing on disk ever makes room. What is read goes to
host memory first, and to the GPU from there.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Literal

from mypy_extensions import mypyc_attr

from simkv.core.scheduler_protocol import DiskTransfers, KvCopy
from simkv.schedulers.vllm.host_block_store import HostBlockStore
from simkv.schedulers.vllm.host_eviction import BlockUses

#: A block is not on disk, or has no room in host memory; it is being read; or nobody knows yet.
LookupResult = Literal["absent", "coming", "unknown"]


@mypyc_attr(allow_interpreted_subclasses=True, serializable=True)
class DiskJob:
    """A transfer under way between disk and host memory: a file for each of ``keys``."""

    def __init__(self, owner: int, keys: Sequence[int], *, writes: bool) -> None:
        self.owner, self.keys, self.writes = owner, keys, writes


@mypyc_attr(allow_interpreted_subclasses=True, serializable=True)
class DiskLookup:
    """Whether a block is on disk, None until that was looked up; it holds for all who ask, until
    the last of the ``askers`` is over, whatever is written meanwhile."""

    def __init__(self) -> None:
        self.answer: bool | None = None
        self.requesters: set[int] = set()


@mypyc_attr(allow_interpreted_subclasses=True, serializable=True)
class DiskTier:
    """``files`` are the blocks on disk; ``jobs`` and ``looks`` are under way, by their numbers.

    ``coming`` are blocks that are being read, or will be from the end of the step on;
    ``promoted[i]`` are those that were read for request ``i``.
    """

    def __init__(self, store: HostBlockStore, block_size: int) -> None:
        self.files: set[int] = set()
        self.jobs: dict[int, DiskJob] = {}
        self.looks: dict[int, list[int]] = {}
        self.coming: set[int] = set()
        self.promoted: dict[int, set[int]] = {}
        self._store, self._size = store, block_size
        self._count = self._looked = 0
        self._verdicts: dict[int, DiskLookup] = {}
        self._asked: dict[int, set[int]] = {}
        self._unknown: list[int] = []
        self._wanted: dict[int, list[int]] = {}
        self._writes: list[KvCopy] = []

    @property
    def has_pending_copies(self) -> bool:
        """Whether something is to be written that no batch has named."""
        return bool(self._writes)

    def find(self, key: int, place: int, asker: int, uses: BlockUses) -> LookupResult:
        """Look for a block that is not in host memory; if it is on disk, it is read."""
        verdict = self._verdicts.get(key)
        if verdict is None:
            verdict = self._verdicts[key] = DiskLookup()
            self._unknown.append(key)
        verdict.requesters.add(asker)
        self._asked.setdefault(asker, set()).add(key)
        if verdict.answer is None:
            return "unknown"
        if not verdict.answer or self._store.write([key], place, uses) is None:
            return "absent"
        self._wanted.setdefault(asker, []).append(key)
        self.promoted.setdefault(asker, set()).add(key)
        self.coming.add(key)
        return "coming"

    def write(self, owner: int, keys: Sequence[int]) -> None:
        """Blocks that have come to host memory are to be written; until then they stay there."""
        self._store.pin(keys)
        self._writes.append(self._begin(DiskJob(owner, keys, writes=True)))

    def moves(self) -> DiskTransfers | None:
        """What begins with a step."""
        reads = [
            self._begin(DiskJob(owner, keys, writes=False)) for owner, keys in self._wanted.items()
        ]
        look = None
        if self._unknown:
            look = self._looked, len(self._unknown)
            self.looks[self._looked] = self._unknown
            self._looked += 1
        writes, self._writes, self._wanted, self._unknown = self._writes, [], {}, []
        return DiskTransfers(reads, writes, look) if reads or writes or look else None

    def done(self, jobs: Iterable[int]) -> None:
        """These transfers are done."""
        for number in jobs:
            job = self.jobs.pop(number)
            if job.writes:
                self.files.update(job.keys)
                self._store.complete_read(job.keys)
            else:
                self.coming.difference_update(job.keys)
                self._store.complete_write(job.keys)

    def looked(self, looks: Iterable[int]) -> None:
        """It is known now of what was to be looked up with these numbers."""
        for number in looks:
            for key in self.looks.pop(number):
                self._verdicts[key].answer = key in self.files
                self._drop(key)

    def forget(self, asker: int) -> None:
        """A request is over, and nothing of it comes to host memory any more."""
        self.promoted.pop(asker, None)
        for key in self._asked.pop(asker, ()):
            self._verdicts[key].requesters.discard(asker)
            self._drop(key)

    def fingerprint(self) -> Hashable:
        """What decides later steps; jobs by their place, for their numbers only grow."""
        jobs = tuple((job.owner, job.writes, *job.keys) for job in self.jobs.values())
        verdicts = tuple((key, v.answer, len(v.requesters)) for key, v in self._verdicts.items())
        return len(self.files), jobs, tuple(map(len, self.looks.values())), verdicts

    def _drop(self, key: int) -> None:
        """Forget what nobody asks any more, unless it is being looked up."""
        verdict = self._verdicts[key]
        if not verdict.requesters and verdict.answer is not None:
            del self._verdicts[key]

    def _begin(self, job: DiskJob) -> KvCopy:
        number = self._count
        self._count += 1
        self.jobs[number] = job
        return KvCopy(number, job.owner, len(job.keys) * self._size)
