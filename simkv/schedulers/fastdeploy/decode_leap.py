"""Computation of several decode-only steps of FastDeploy at once."""

from __future__ import annotations

from collections import Counter

from simkv.schedulers.fastdeploy.resource_manager import (
    FastDeployRequest,
    RequestStatus,
    ResourceManager,
)
from simkv.schedulers.fastdeploy.worker import FastDeployWorker, Slot


def leapable_steps(manager: ResourceManager, worker: FastDeployWorker, most: int) -> int:
    """Return the number of next steps in which all scheduled requests decode.

    The step of the last scheduling decision counts. The result is between 1 and ``most``.
    """
    # The step of the last scheduling decision counts as the first.
    waits = bool(manager.waiting) and not manager.full
    if not _agree(manager, worker) or (waits and not manager.admission_is_stable):
        return 1
    free = manager.pool.free
    for step, growing in sorted(_growth(manager, most - 1).items()):
        free -= growing * manager.grows_by
        if waits or free < 0:  # a new block changes the admission test
            return step
    return most


def skip_steps(manager: ResourceManager, worker: FastDeployWorker, steps: int) -> list[int]:
    """Simulate ``steps`` decode steps. Return the number of free blocks after each step."""
    growth = _growth(manager, steps)
    free, left = [], manager.pool.free
    for step in range(1, steps + 1):
        left -= growth[step] * manager.grows_by
        free.append(left)
    for seq in manager.running:
        slot = _slot(seq, worker)
        assert slot is not None
        blocks = len(manager.growing(seq, steps)) * manager.grows_by
        manager.pool.take(seq.id, blocks)
        slot.blocks += blocks
        slot.length += steps
        seq.out += steps
        seq.computed = seq.total - 1
        seq.status = RequestStatus.RUNNING_DECODE
    manager.decay(steps, len(growth))
    return free


def _growth(manager: ResourceManager, steps: int) -> Counter[int]:
    """Return the number of requests that get blocks, by step.

    Steps in which no request gets blocks are omitted.
    """
    return Counter(step for seq in manager.running for step in manager.growing(seq, steps))


def _agree(manager: ResourceManager, worker: FastDeployWorker) -> bool:
    """Return whether engine and worker have the same state and every request decodes."""
    if not manager.running or manager.pending or manager.active or worker.flags:
        return False
    busy = sum(slot.state != "idle" for slot in worker.slots.values())
    return busy == len(manager.running) and all(
        _decodes(s, manager, worker) for s in manager.running
    )


def _decodes(seq: FastDeployRequest, manager: ResourceManager, worker: FastDeployWorker) -> bool:
    slot = _slot(seq, worker)
    if slot is None or not seq.decoding or slot.state != "decode":
        return False
    held = manager.pool.held(seq.id)
    enough = held * manager.block_size >= seq.total
    return enough and (slot.id, slot.length, slot.blocks) == (seq.id, seq.total, held)


def _slot(seq: FastDeployRequest, worker: FastDeployWorker) -> Slot | None:
    return None if seq.slot is None else worker.slots.get(seq.slot)
