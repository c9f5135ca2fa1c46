"""Recording format of FastDeploy: a line per step or, in threaded mode, a line per tick."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

from simkv.core.recording_format import RecordingFormat, RecordingLine, TickFormat
from simkv.core.request import Prompt
from simkv.core.scheduler_protocol import Batch
from simkv.schedulers.fastdeploy.config import FastDeployConfig

if TYPE_CHECKING:
    from simkv.schedulers.fastdeploy.resource_manager import ResourceManager
    from simkv.schedulers.fastdeploy.scheduler import FastDeployScheduler
    from simkv.schedulers.fastdeploy.worker import WorkerTask

#: Output tokens are recorded as this base plus their index, or as the end-of-sequence token.
TOKEN_BASE = 1000
TOKEN_EOS = 2


def _config(header: RecordingLine) -> FastDeployConfig:
    """Read the options in a recording's header.

    A string in place of a value means that the variant does not have the option.
    """
    knobs = {field.name for field in fields(FastDeployConfig)}
    known = {k: v for k, v in header["config"].items() if k in knobs and not isinstance(v, str)}
    if "delays" in header:
        known["idle_worker_sends_ack"] = header["delays"]["idle_worker_sends_ack"]
    return FastDeployConfig(variant=header["variant"], **known)


def _knobs(config: FastDeployConfig) -> RecordingLine:
    knobs = asdict(config)
    del knobs["name"], knobs["variant"]
    return knobs


def _prompt(request: RecordingLine) -> Prompt:
    return Prompt(request["id"], request["prompt_tokens"], request["max_tokens"])


def _shown(prompt: Prompt) -> RecordingLine:
    return {"max_tokens": prompt.max_tokens}


def _decide(engine: FastDeployScheduler) -> tuple[Batch, RecordingLine]:
    acked = engine.acked
    batch = engine.schedule()
    return batch, {
        "acked": acked,
        "tasks": [_task(task) for task in engine.tasks],
        "stalled": engine.stalled,
        "pending_reschedule": sorted(engine.pending_ids()),
        "blocks_held": {str(i): blocks for i, blocks in engine.blocks_held().items()},
        "active_chunk": engine.active_id(),
        **_reservation(engine.manager),
    }


def _reservation(manager: ResourceManager) -> RecordingLine:
    from simkv.schedulers.fastdeploy.fixed_reserve import DecodeOnlyPreempt, FixedReserve
    from simkv.schedulers.fastdeploy.ratio_reserve import RatioReserve

    if isinstance(manager, RatioReserve) or (
        isinstance(manager, DecodeOnlyPreempt) and manager.by_ratio
    ):
        return {"ratio": manager.ratio}
    assert isinstance(manager, FixedReserve)
    return {"reserve": [manager.reserve, manager.reserve_exact, manager.relaxed]}


def _queues(manager: ResourceManager) -> RecordingLine:
    """Return the queues and slots that engine and token processor share."""
    return {
        "waiting": [seq.id for seq in manager.waiting],
        "running": [seq.id for seq in manager.running],
        "pending_reschedule": sorted(manager.pending),
        "slots": {str(i): seq.id for i, seq in enumerate(manager.slots) if seq},
        "tokens": {str(s.id): [s.computed, s.need, s.total] for s in manager.alive()},
        "free_blocks": manager.pool.free,
    }


def _task(task: WorkerTask) -> list[Any]:
    span = [task.start, task.end] if task.kind == "prefill" else []
    return [task.kind, task.id, *span]


def _serialised(task: WorkerTask) -> list[Any]:
    more = {"prefill": [task.length], "decode": [task.blocks]}
    return _task(task) + more.get(task.kind, [])


def _token(token: int) -> int:
    from simkv.schedulers.fastdeploy.worker import EOS

    if token == EOS:
        return TOKEN_EOS
    return TOKEN_BASE + token if token > 0 else token


RECORDING = RecordingFormat(
    _config,
    _prompt,
    _knobs,
    _shown,
    reads_queues_early=True,
    decide=_decide,
    handles_aborts=False,
    ticks=TickFormat(_queues, _serialised, _token),
)
