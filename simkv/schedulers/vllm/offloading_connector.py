"""vLLM's offloading connector, its side in the scheduler: copies of KV to host memory and back.

Rules of ``OffloadingConnectorScheduler`` (vllm/distributed/kv_transfer/kv_connector/v1/offloading/
scheduler.py) with its defaults: blocks of prompts only, one by one, for one group of layers
and one worker. The scheduler asks what is there (``matched``) and says what it has done; each step
ends in copies to begin (``moves``) and later in those that are done (``done``).
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence

from mypy_extensions import mypyc_attr

from simkv.core.block_pool import NO_BLOCKS
from simkv.core.scheduler_protocol import KvCopies, KvCopy, WaitReason
from simkv.schedulers.vllm.disk_tier import DiskTier
from simkv.schedulers.vllm.host_block_store import HostBlockStore
from simkv.schedulers.vllm.host_eviction import BEING_WRITTEN, BlockUses
from simkv.schedulers.vllm.memory import VllmMemory
from simkv.schedulers.vllm.release_rules import VllmRules
from simkv.schedulers.vllm.request_state import RequestState

#: What a release dies of, in its next step, that stores whatever a client leaves behind.
ABORT_CRASH = "AssertionError: a client left whose prompt has no blocks yet"


@mypyc_attr(allow_interpreted_subclasses=True, serializable=True)
class CopyJob:
    """A job under way: the ``keys`` of what is copied, from ``blocks`` of the GPU if ``stores``."""

    def __init__(self, owner: int, keys: Sequence[int], blocks: Sequence[int], *, stores: bool):
        self.owner = owner
        self.keys, self.blocks, self.stores = keys, blocks, stores


@mypyc_attr(allow_interpreted_subclasses=True, serializable=True)
class RequestOffloadState:
    """What the connector knows of a request: ``stored`` blocks of its prompt need no thought more.

    ``left`` are the blocks that it had when it stopped running, until it asks again.

    ``named`` of its blocks were full when it was last looked at. ``jobs`` are under way for it.
    ``over``: it has ended and all its copies are begun.
    """

    def __init__(self, r: RequestState) -> None:
        self.r = r
        self.uses = BlockUses()
        self.stored = self.named = 0
        self.left: array[int] = NO_BLOCKS
        self.jobs: set[int] = set()
        self.over = False


@mypyc_attr(allow_interpreted_subclasses=True, serializable=True)
class OffloadingConnector:
    """Jobs, numbered in order, and whose blocks they copy.

    A block of an ended request from which a copy is under way (``fences``) may be taken by others,
    but the step in which it is waits for the copy. ``behind`` is what the last one waits for that
    has to ask again; there may be a ``disk`` behind host memory.
    """

    def __init__(
        self,
        memory: VllmMemory,
        capacity: int,
        policy: str,
        rules: VllmRules,
        *,
        disk: bool = False,
    ) -> None:
        self.store = HostBlockStore(capacity, policy, rules)
        self.disk = DiskTier(self.store, memory.block_size) if disk else None
        self.behind: WaitReason = "kv"
        self._rules = rules
        self.jobs: dict[int, CopyJob] = {}
        self._memory, self._size = memory, memory.block_size
        self._count = 0
        self._shares: dict[int, RequestOffloadState] = {}
        self._owing: dict[int, RequestState] = {}
        self._ended: dict[int, tuple[int, array[int]]] = {}
        self._arriving: set[int] = set()
        self._fences: dict[int, set[int]] = {}
        self._loads: list[KvCopy] = []
        self.died: str | None = None

    def enter(self, r: RequestState) -> None:
        """A request is new."""
        self._shares[r.id] = RequestOffloadState(r)

    def matched(self, r: RequestState, here: int) -> int | None:
        """Blocks in host memory that follow on the first ``here`` of ``r``; None: ask again later.

        That is so while it has copies under way, or one of the blocks is being written or read, or
        may be on disk.
        """
        share = self._shares[r.id]
        self.behind = "kv"
        share.left = NO_BLOCKS
        if self._rules.offers_again:
            share.stored = 0
        if share.jobs:
            return None
        count = r.length // self._size
        self._memory.name(r, count * self._size)
        refs, disk, found, wait = self.store.refs, self.disk, 0, False
        for place in range(here, count):
            key = r.keys[place]
            if key in refs:
                wait = wait or refs[key] == BEING_WRITTEN or key in self._arriving
                if disk and key in disk.coming:
                    self.behind = "disk"
            elif disk is None or disk.find(key, place, r.id, share.uses) == "absent":
                break
            else:
                wait, self.behind = True, "disk"
            found += 1
        share.named = max(share.named, count)
        self._touch(share)
        return None if wait else found

    def load(self, r: RequestState, first: int, end: int) -> None:
        """Blocks ``first`` to ``end`` of ``r`` are copied from host memory; they are there."""
        share, keys = self._shares[r.id], r.keys[first:end]
        self.store.read(keys, first, share.uses)
        share.stored = end
        self._arriving.update(keys)
        load = self._begin(CopyJob(r.id, keys, (), stores=False), share)
        if self.disk and (promoted := self.disk.promoted.get(r.id)):
            load = load._replace(disk=sum(key in promoted for key in keys) * self._size)
        self._loads.append(load)

    def runs(self, r: RequestState) -> None:
        """``r`` computes tokens: those of its prompt are to be stored."""
        prompt = r.prompt.prompt_tokens
        again = not self._rules.keeps_stored and r.computed < prompt
        if again or self._shares[r.id].stored < prompt // self._size:
            self._owing[r.id] = r

    def stops(self, r: RequestState, table: array[int]) -> None:
        """``r`` runs no more; it had the blocks of ``table``."""
        self._owing.pop(r.id, None)
        self._shares[r.id].left = table[:]

    def ends(
        self, r: RequestState, length: int, computed: int | None, table: array[int] | None
    ) -> None:
        """``r`` is over, of some length; it runs with the blocks of ``table`` if that is one.

        If its client has left, so many tokens are ``computed``.
        """
        self._owing.pop(r.id, None)
        share, tokens = self._shares[r.id], r.prompt.prompt_tokens
        share.named = length // self._size
        blocks = share.left if table is None else table[:]
        if computed is not None and self._rules.counts_left:
            tokens = min(computed, tokens)
        for job in share.jobs:
            self._fence(job)
        self._ended[r.id] = (tokens if self._rules.stores_at_end else 0), blocks

    def moves(
        self,
        given: Iterable[tuple[RequestState, int, int]],
        tables: Mapping[int, array[int]],
        taken: Collection[int],
        preempted: Iterable[int],
    ) -> KvCopies | None:
        """The copies that begin with a step, and those that it has to wait for.

        Running requests of some length are ``given`` tokens, in their order; blocks were ``taken``
        by somebody.
        """
        flush = {job for i in preempted for job in self._shares[i].jobs}
        if self._fences:
            flush.update(job for block in taken for job in self._fences.get(block, ()))
        stores: list[KvCopy] = []
        for r, length, n in given:
            self._shares[r.id].named = length // self._size
            end = min(r.computed + n, r.length, r.prompt.prompt_tokens)
            self._offer(r, end, tables[r.id], stores)
        for i in sorted(self._ended):
            share, (tokens, blocks) = self._shares[i], self._ended[i]
            if not self._rules.counts_left and len(blocks) < tokens // self._size > share.stored:
                self.died = ABORT_CRASH
            job = self._offer(share.r, min(tokens, len(blocks) * self._size), blocks, stores)
            if job is not None:
                self._fence(job)
                if not set(self.jobs[job].blocks).isdisjoint(taken):
                    flush.add(job)
        for i in sorted(self._ended):
            share = self._shares[i]
            share.over = True
            self.store.over(share.uses)
            self._forget(share)
        self._ended.clear()
        loads, self._loads = self._loads, []
        on_disk = self.disk.moves() if self.disk else None
        if not (loads or stores or flush or on_disk):
            return None
        return KvCopies(loads, stores, sorted(flush), on_disk)

    @property
    def fenced(self) -> bool:
        """Whether a block that a step takes may make it wait for a copy."""
        return bool(self._fences)

    def owing(self) -> list[RequestState]:
        """Running requests whose prompts are not all stored."""
        return list(self._owing.values())

    def done(self, jobs: Iterable[int]) -> list[int]:
        """These copies are done. Returns the requests that were waiting for one."""
        arrived = []
        for number in jobs:
            job = self.jobs.pop(number)
            share = self._shares[job.owner]
            if job.stores:
                self.store.complete_write(job.keys)
                if self.disk:
                    self.disk.write(job.owner, job.keys)
            else:
                self.store.complete_read(job.keys)
                self._arriving.difference_update(job.keys)
                arrived.append(job.owner)
            for block in job.blocks:
                if number in self._fences.get(block, ()):
                    self._fences[block].discard(number)
                    if not self._fences[block]:
                        del self._fences[block]
            share.jobs.discard(number)
            if not share.jobs and not self._rules.keeps_ended and job.owner in self._ended:
                self._ended[job.owner] = 0, NO_BLOCKS
            self._forget(share)
        return arrived

    def fingerprint(self) -> Hashable:
        """What decides later steps; jobs by their place, for their numbers only grow."""
        stored = tuple((i, share.stored, len(share.jobs)) for i, share in self._shares.items())
        jobs = tuple((job.owner, job.stores, len(job.keys)) for job in self.jobs.values())
        on_disk = self.disk.fingerprint() if self.disk else None
        return stored, jobs, tuple(self._fences), self.store.fingerprint(), on_disk

    def _offer(
        self, r: RequestState, end: int, table: array[int], stores: list[KvCopy]
    ) -> int | None:
        """Store the blocks of ``r`` up to token ``end`` as far as they are not; a job if any."""
        share, last = self._shares[r.id], end // self._size
        first = share.stored
        if last <= first:
            if not self._rules.keeps_stored:
                share.stored = last
            if last == r.prompt.prompt_tokens // self._size:
                self._owing.pop(r.id, None)
            return None
        self._memory.name(r, last * self._size)
        keys = r.keys[first:last]
        absent = self.store.write(keys, first, share.uses)
        if absent is None:
            return None  # for want of room: again in its next step
        share.stored = last
        if last == r.prompt.prompt_tokens // self._size:
            self._owing.pop(r.id, None)
        if not absent:
            return None
        wanted = set(absent)
        self._touch(share)
        blocks = [table[first + i] for i, key in enumerate(keys) if key in wanted]
        stores.append(self._begin(CopyJob(r.id, absent, blocks, stores=True), share))
        return stores[-1].job

    def _touch(self, share: RequestOffloadState) -> None:
        """All blocks of a request that are known by a key count as used now."""
        if not self._rules.uses_at_end:
            r = share.r
            self._memory.name(r, share.named * self._size)
            self.store.touch(r.keys[: share.named])

    def _begin(self, copy: CopyJob, share: RequestOffloadState) -> KvCopy:
        number = self._count
        self._count += 1
        self.jobs[number] = copy
        share.jobs.add(number)
        return KvCopy(number, copy.owner, len(copy.keys) * self._size)

    def _fence(self, job: int) -> None:
        for block in self.jobs[job].blocks:
            self._fences.setdefault(block, set()).add(job)

    def _forget(self, share: RequestOffloadState) -> None:
        if not share.over:
            return
        if self.disk and not any(self.jobs[job].stores for job in share.jobs):
            self.disk.forget(share.r.id)
        if not share.jobs:
            del self._shares[share.r.id]
