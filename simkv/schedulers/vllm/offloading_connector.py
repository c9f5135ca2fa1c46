# mypyc: compile
"""Scheduler side of vLLM's offloading connector: KV copies between the GPU and host memory.

Source: ``OffloadingConnectorScheduler``
(vllm/distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py) with default settings: only
blocks of prompts are copied, each block separately, for one layer group and one worker. The
scheduler looks up blocks (``matched``) and reports which requests run, stop and end. Each step
starts copies (``moves``), and ``done`` records their completion.
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

#: Error in the next step of releases that store the whole prompt even after a client disconnects.
ABORT_CRASH = "AssertionError: a client left whose prompt has no blocks yet"


@mypyc_attr(allow_interpreted_subclasses=True, serializable=True)
class CopyJob:
    """A copy in flight between the GPU and host memory.

    - ``owner``: id of the request.
    - ``keys``: keys of the copied blocks.
    - ``blocks``: ids of the GPU blocks (only copies to host memory).
    - ``stores``: whether the copy goes to host memory.
    """

    def __init__(self, owner: int, keys: Sequence[int], blocks: Sequence[int], *, stores: bool):
        self.owner = owner
        self.keys, self.blocks, self.stores = keys, blocks, stores


@mypyc_attr(allow_interpreted_subclasses=True, serializable=True)
class RequestOffloadState:
    """State of a request in the connector.

    - ``uses``: blocks in host memory that the request uses.
    - ``stored``: number of prompt blocks that are or will be stored in host memory.
    - ``left``: ids of the blocks that the request held when it stopped running.
    - ``named``: number of full blocks of the request when it was last considered.
    - ``jobs``: numbers of the request's copies in flight.
    - ``over``: whether the request has ended and all its copies have started.
    """

    # ``left`` is valid until the next lookup of the request.

    def __init__(self, r: RequestState) -> None:
        self.r = r
        self.uses = BlockUses()
        self.stored = self.named = 0
        self.left: array[int] = NO_BLOCKS
        self.jobs: set[int] = set()
        self.over = False


@mypyc_attr(allow_interpreted_subclasses=True, serializable=True)
class OffloadingConnector:
    """Copies between the GPU and host memory.

    - ``jobs``: copies in flight, by number.
    - ``behind``: reason why the last lookup has no result yet.
    - ``disk``: disk tier, or None.
    """

    # When a request ends, its blocks can be reallocated while they are still being copied;
    # ``_fences`` records these blocks, and a step that reuses one of them waits for the copy.

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
        """Add the state of a new request."""
        self._shares[r.id] = RequestOffloadState(r)

    def matched(self, r: RequestState, here: int) -> int | None:
        """Return the number of blocks that ``r`` can load from host memory.

        The first ``here`` blocks are on the GPU and do not count. Returns None if the number is not
        known yet.
        """
        # The result is None while the request has copies in flight, or while one of the blocks is
        # being written, read or looked up on disk. The scheduler repeats the lookup in a later
        # step.
        share = self._shares[r.id]
        self.behind = "kv"
        share.left = NO_BLOCKS
        if self._rules.offers_prompt_again:
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
        """Start to copy blocks ``first`` to ``end`` of ``r`` from host memory to the GPU."""
        # All of these blocks must be in host memory.
        share, keys = self._shares[r.id], r.keys[first:end]
        self.store.read(keys, first, share.uses)
        share.stored = end
        self._arriving.update(keys)
        load = self._begin(CopyJob(r.id, keys, (), stores=False), share)
        if self.disk and (promoted := self.disk.promoted.get(r.id)):
            load = load._replace(disk=sum(key in promoted for key in keys) * self._size)
        self._loads.append(load)

    def runs(self, r: RequestState) -> None:
        """Record that a step computes tokens of ``r``, so that blocks of its prompt can be
        stored.
        """
        prompt = r.prompt.prompt_tokens
        again = not self._rules.remembers_offered and r.computed < prompt
        if again or self._shares[r.id].stored < prompt // self._size:
            self._owing[r.id] = r

    def stops(self, r: RequestState, table: array[int]) -> None:
        """Record that ``r`` stops running. ``table`` lists the ids of its blocks."""
        self._owing.pop(r.id, None)
        self._shares[r.id].left = table[:]

    def ends(
        self, r: RequestState, length: int, computed: int | None, table: array[int] | None
    ) -> None:
        """Record the end of ``r``.

        - ``length``: number of prompt and output tokens.
        - ``computed``: number of computed tokens if the client disconnected, else None.
        - ``table``: ids of the blocks; None if ``r`` is not running.
        """
        self._owing.pop(r.id, None)
        share, tokens = self._shares[r.id], r.prompt.prompt_tokens
        share.named = length // self._size
        blocks = share.left if table is None else table[:]
        if computed is not None and self._rules.offers_computed_only:
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
        """Return the copies that start with a step, and the copies for which the step must wait.

        Returns None if there are none.

        - ``given``: running requests, each with its length and its scheduled tokens.
        - ``tables``: block ids by request id.
        - ``taken``: ids of the blocks allocated in this step.
        - ``preempted``: ids of the requests preempted in this step.
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
            if (
                not self._rules.offers_computed_only
                and len(blocks) < tokens // self._size > share.stored
            ):
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
        """Whether some blocks can be reused only after a copy of them has completed."""
        return bool(self._fences)

    def owing(self) -> list[RequestState]:
        """Return the running requests whose prompts are not completely stored in host memory."""
        return list(self._owing.values())

    def done(self, jobs: Iterable[int]) -> list[int]:
        """Record the completion of copies.

        Return the ids of the requests that waited for the copies.
        """
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
            if (
                not share.jobs
                and not self._rules.stores_after_last_copy
                and job.owner in self._ended
            ):
                self._ended[job.owner] = 0, NO_BLOCKS
            self._forget(share)
        return arrived

    def fingerprint(self) -> Hashable:
        """Return the state that determines later steps."""
        # Copies are included without their numbers, because the numbers only increase.
        stored = tuple((i, share.stored, len(share.jobs)) for i, share in self._shares.items())
        jobs = tuple((job.owner, job.stores, len(job.keys)) for job in self.jobs.values())
        on_disk = self.disk.fingerprint() if self.disk else None
        return stored, jobs, tuple(self._fences), self.store.fingerprint(), on_disk

    def _offer(
        self, r: RequestState, end: int, table: array[int], stores: list[KvCopy]
    ) -> int | None:
        """Start to store the blocks of ``r`` up to token ``end``.

        Returns the number of the copy or None.
        """
        # None means that there is nothing to copy or no space in host memory. The copy is appended
        # to ``stores``.
        share, last = self._shares[r.id], end // self._size
        first = share.stored
        if last <= first:
            if not self._rules.remembers_offered:
                share.stored = last
            if last == r.prompt.prompt_tokens // self._size:
                self._owing.pop(r.id, None)
            return None
        self._memory.name(r, last * self._size)
        keys = r.keys[first:last]
        absent = self.store.write(keys, first, share.uses)
        if absent is None:
            return None  # no free block: retried in its next step
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
        """Count a use of all full blocks of a request."""
        # Releases with the rule ``counts_uses_at_end`` count uses when the request ends.
        if not self._rules.counts_uses_at_end:
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
