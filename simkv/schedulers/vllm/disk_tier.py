# mypyc: compile
"""vLLM's KV blocks on disk, as a tier below host memory: lookups, reads and writes.

Source: ``TieringOffloadingManager`` (vllm/v1/kv_offload/tiering/manager.py, 0.33.0) with one tier
of files (``tiering/fs/manager.py``, ``tiering/async_lookup.py``) and default settings. All blocks
copied from the GPU to host memory are also written to disk, and nothing is evicted from disk. A
block read from disk goes to host memory first and from there to the GPU.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Literal

from mypy_extensions import mypyc_attr

from simkv.core.scheduler_protocol import DiskTransfers, KvCopy
from simkv.schedulers.vllm.host_block_store import HostBlockStore
from simkv.schedulers.vllm.host_eviction import BlockUses

#: Results of a lookup: the block is not on disk or does not fit in host memory; the block is being
#: read; the lookup has not completed.
LookupResult = Literal["absent", "coming", "unknown"]


@mypyc_attr(allow_interpreted_subclasses=True, serializable=True)
class DiskJob:
    """A transfer in flight between disk and host memory.

    - ``owner``: id of the request.
    - ``keys``: cache keys of the transferred blocks.
    - ``writes``: whether the transfer goes to disk.
    """

    def __init__(self, owner: int, keys: Sequence[int], *, writes: bool) -> None:
        self.owner, self.keys, self.writes = owner, keys, writes


@mypyc_attr(allow_interpreted_subclasses=True, serializable=True)
class DiskLookup:
    """Lookup of a block on disk.

    ``answer`` is None until the lookup completes. ``requesters`` are the ids of the requests that
    wait for it.
    """

    # The answer stays valid until the last of these requests ends, even if the block is written to
    # disk in the meantime.

    def __init__(self) -> None:
        self.answer: bool | None = None
        self.requesters: set[int] = set()


@mypyc_attr(allow_interpreted_subclasses=True, serializable=True)
class DiskTier:
    """KV blocks on disk.

    - ``files``: cache keys of the blocks on disk.
    - ``jobs``: transfers in flight, by number.
    - ``looks``: lookups in flight, by number. Each has a list of cache keys.
    - ``coming``: cache keys of the blocks that are being read from disk.
    - ``promoted``: cache keys of the blocks that were read from disk, by request id.
    """

    # ``coming`` includes blocks whose read starts at the end of the step.

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
        """Whether there are writes to disk that are not listed in a batch yet."""
        return bool(self._writes)

    def find(self, key: int, place: int, asker: int, uses: BlockUses) -> LookupResult:
        """Look up a block and start to read it if it is on disk.

        ``place`` is the position of the block in the prompt of request ``asker``.
        """
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
        """Start to write blocks from host memory to disk.

        The blocks cannot be evicted from host memory until the write completes.
        """
        self._store.pin(keys)
        self._writes.append(self._begin(DiskJob(owner, keys, writes=True)))

    def moves(self) -> DiskTransfers | None:
        """Return the disk transfers and the lookup that start with this step.

        Returns None if nothing starts.
        """
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
        """Record the completion of transfers. ``jobs`` are their numbers."""
        for number in jobs:
            job = self.jobs.pop(number)
            if job.writes:
                self.files.update(job.keys)
                self._store.complete_read(job.keys)
            else:
                self.coming.difference_update(job.keys)
                self._store.complete_write(job.keys)

    def looked(self, looks: Iterable[int]) -> None:
        """Record the completion of lookups. ``looks`` are their numbers."""
        for number in looks:
            for key in self.looks.pop(number):
                self._verdicts[key].answer = key in self.files
                self._drop(key)

    def forget(self, asker: int) -> None:
        """Discard the lookups of an ended request."""
        # The copies of the request from the GPU to host memory must be complete.
        self.promoted.pop(asker, None)
        for key in self._asked.pop(asker, ()):
            self._verdicts[key].requesters.discard(asker)
            self._drop(key)

    def fingerprint(self) -> Hashable:
        """Return the state that determines later steps."""
        # Jobs are included without their numbers, because the numbers only grow.
        jobs = tuple((job.owner, job.writes, *job.keys) for job in self.jobs.values())
        verdicts = tuple((key, v.answer, len(v.requesters)) for key, v in self._verdicts.items())
        return len(self.files), jobs, tuple(map(len, self.looks.values())), verdicts

    def _drop(self, key: int) -> None:
        """Delete the lookup of ``key`` if it is complete and no request uses it."""
        verdict = self._verdicts[key]
        if not verdict.requesters and verdict.answer is not None:
            del self._verdicts[key]

    def _begin(self, job: DiskJob) -> KvCopy:
        number = self._count
        self._count += 1
        self.jobs[number] = job
        return KvCopy(number, job.owner, len(job.keys) * self._size)
