"""ResourceManagerV1 of PaddlePaddle/FastDeploy and PR #7038, 2026-01 to 2026-04, bugs included.

There are three actors. The **resource manager** decides (``fixed_reserve`` and ``ratio_reserve``)
and sends tasks. The **worker** has a slot for each request and sends one message per executed step.
A decode continues in its slot, without further tasks, until its blocks are full. The **token
processor** reads the messages and shares the manager's state. ``FastDeployScheduler`` runs them in
lockstep. The pipeline simulation can run them with delays; only then do the ``preempt-sync``
variants differ.

In all variants a preempted request loses its blocks at once, keeps its outputs and its slot, and
stays in ``pending`` until the worker acknowledges the preemption. After that, the request prefills
its prompt and outputs again. The model covers text-only requests in the ``mixed`` role, without
prefix caching.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping

from simkv.core.actor_protocol import MessageEffects, Threads, WorkerCrash
from simkv.core.request import Prompt
from simkv.core.scheduler_protocol import (
    Batch,
    BatchKind,
    Completion,
    WaitReason,
)
from simkv.schedulers.fastdeploy.config import FastDeployConfig
from simkv.schedulers.fastdeploy.decode_leap import leapable_steps, skip_steps
from simkv.schedulers.fastdeploy.fixed_reserve import DecodeOnlyPreempt, FixedReserve
from simkv.schedulers.fastdeploy.ratio_reserve import RatioReserve
from simkv.schedulers.fastdeploy.resource_manager import ResourceManager, TokenProcessor
from simkv.schedulers.fastdeploy.worker import FastDeployWorker, SlotWork, WorkerTask


def build_actors(
    config: FastDeployConfig,
) -> tuple[ResourceManager, FastDeployWorker, TokenProcessor]:
    """Build the three actors of a variant."""
    variant = config.variant
    manager: ResourceManager
    if variant in ("ratio", "ratio-worker-faithful"):
        manager = RatioReserve(config)
    elif variant == "decode-only-preempt":
        manager = DecodeOnlyPreempt(config)
    else:
        manager = FixedReserve(config, full_need=variant != "fixed-reserve")
    sentinel = variant != "preempt-sync-minus1"
    worker = FastDeployWorker(
        config.block_size,
        sentinel=sentinel,
        decode_clears_flag=variant != "ratio",
        idle_sends=config.idle_worker_sends_ack,
    )
    return manager, worker, TokenProcessor(manager, sentinel=sentinel)


class FastDeployScheduler(Threads):
    """Resource manager, worker and token processor in lockstep.

    - ``complete`` must also be called for empty batches.
    - ``tasks``: tasks for the worker in the last batch.
    - ``stalled``: decoding requests that lacked a block in the last batch.
    - ``acked``: preempted requests that the last ``complete`` call acknowledged.
    """

    # The message of an empty batch can acknowledge a preemption.

    pipeline_depth = 1
    manager: ResourceManager
    worker: FastDeployWorker
    processor: TokenProcessor

    def __init__(self, config: FastDeployConfig) -> None:
        self.manager, self.worker, self.processor = build_actors(config)
        self.tasks: list[WorkerTask] = []
        self.stalled: list[int] = []
        self.acked: list[int] = []

    def add(self, prompt: Prompt) -> None:
        """Add a new request, just before a ``schedule`` call."""
        self.manager.add(prompt)

    def schedule(self) -> Batch:
        """Make the scheduling decisions of one call.

        Returns the batch of the worker's next step.
        """
        planned = self.manager.schedule()
        parcel = self.manager.put(planned)
        self.tasks = parcel.tasks
        try:
            self.worker.take(parcel)
        except WorkerCrash as crash:
            preempted, causes = self.manager.preempted, self.manager.causes
            return Batch(preempted=preempted, causes=causes, fatal=f"raised: {crash}")
        place = {id_: i for i, id_ in enumerate(self.running_ids())}
        self.stalled = sorted(self.worker.stalled(), key=lambda i: place.get(i, len(place)))
        work = self.worker.work()
        prefills = sum(task.kind == "prefill" for task in parcel.tasks)
        work[prefills:] = sorted(work[prefills:], key=lambda w: place.get(w.id, len(place)))
        batch = self.batch_of(work, prefills, self.manager.preempted)
        batch.causes, batch.held = self.manager.causes, self.manager.held()
        batch.aside = self.aside()
        return batch

    def complete(self, batch: Batch, ended: Collection[int]) -> Completion:
        """Run one step of the worker and process its message.

        The requests in ``ended`` emit their last token.
        """
        del batch  # the batch is not needed: the worker has its own copy of the tasks
        message = self.worker.step(lambda id_, _: id_ in ended)
        heard = self.processor.receive(message) if message is not None else MessageEffects()
        self.acked = heard.acked
        return Completion(heard.delivered, heard.finished)

    def abort(self, request_id: int) -> None:
        """Do nothing: a request runs to its end even if its client disconnects."""
        # How these revisions handle aborts is unknown, because no recording contains one.

    @property
    def num_blocks(self) -> int:
        """Number of blocks in the pool."""
        return self.manager.pool.num_blocks

    @property
    def free_blocks(self) -> int:
        """Number of free blocks."""
        return self.manager.pool.free

    @property
    def num_waiting(self) -> int:
        """Number of waiting requests, plus preempted requests that are not acknowledged yet."""
        return len(self.manager.waiting) + len(self.manager.pending)

    @property
    def num_running(self) -> int:
        """Number of running requests.

        In the ``ratio`` variants, a request with an unfinished prefill also counts.
        """
        return len(self.manager.running) + (self.manager.active is not None)

    def leap(self, most: int) -> int:
        """Return the number of decode-only steps for which enough blocks are free.

        The result is at most ``most``.
        """
        return leapable_steps(self.manager, self.worker, most)

    def skip(self, steps: int) -> list[int]:
        free = skip_steps(self.manager, self.worker, steps - 1)
        self.complete(Batch(), ())
        self.schedule()
        return [*free, self.free_blocks]

    def waiting_ids(self) -> list[int]:
        """Return the ids of the waiting requests, in queue order."""
        return [seq.id for seq in self.manager.waiting]

    def running_ids(self) -> list[int]:
        """Return the ids of the running requests, in admission order."""
        # The unfinished prefill of the ``ratio`` variants is not included.
        return [seq.id for seq in self.manager.running]

    def pending_ids(self) -> list[int]:
        """Return the ids of the preempted requests that are not acknowledged yet, oldest first."""
        return list(self.manager.pending)

    def active_id(self) -> int | None:
        """Return the id of the request whose chunked prefill is unfinished, or None.

        Only the ``ratio`` variants have such a request.
        """
        return self.manager.active.id if self.manager.active else None

    def blocks_held(self) -> Mapping[int, int]:
        """Return the number of blocks of each request, by request id."""
        return {i: held for i, held in self.manager.pool.holdings().items() if held}

    def fingerprint(self) -> Hashable:
        """Return the state of engine and worker that determines the following steps."""
        return self.manager.fingerprint(), self.worker.fingerprint()

    def aside(self) -> dict[int, WaitReason]:
        """Return the running requests that lack a block, each with the reason why it waits."""
        # While the ``ratio`` variants prefill, no decode gets a block, even if blocks are free.
        manager, worker = self.manager, self.worker
        gated = isinstance(manager, RatioReserve) and manager.prefilled
        lacking: dict[int, WaitReason] = {} if gated else dict.fromkeys(worker.stalled(), "blocks")
        chunks = (slot.id for slot in worker.slots.values() if slot.state == "chunk stopped")
        return lacking | dict.fromkeys(chunks, manager.why)

    def batch_of(self, work: list[SlotWork], prefills: int, preempted: list[int]) -> Batch:
        """Convert the work of a worker step to a batch.

        The first ``prefills`` items of ``work`` are prefills.
        """
        return Batch(
            scheduled=[(w.id, w.tokens) for w in work],
            context=[w.context for w in work],
            emits=[w.id for w in work if w.emits],
            kind=_kind(work, prefills),
            preempted=preempted,
        )


def _kind(work: list[SlotWork], prefills: int) -> BatchKind:
    if not work:
        return "idle"
    if prefills == 0:
        return "decode"
    return "prefill" if prefills == len(work) else "mixed"
