"""Recording format of mistral.rs: one line per iteration of the engine's loop."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from simkv.core.recording_format import RecordingFormat, RecordingLine
from simkv.core.request import Prompt, Segment
from simkv.core.scheduler_protocol import Batch
from simkv.schedulers.mistralrs.config import MistralrsConfig

if TYPE_CHECKING:
    from simkv.schedulers.mistralrs.scheduler_base import MistralrsScheduler


def _config(header: RecordingLine) -> MistralrsConfig:
    recorded = dict(header["config"])
    recorded["num_gpu_blocks"] = recorded.pop("num_gpu_blocks_arg")
    del recorded["num_blocks"]
    return MistralrsConfig(variant=header["variant"].removesuffix("_wtinf"), **recorded)


def _knobs(config: MistralrsConfig) -> RecordingLine:
    knobs = asdict(config)
    del knobs["name"], knobs["variant"], knobs["rule"]  # the engine has no custom policy
    knobs["num_gpu_blocks_arg"] = knobs.pop("num_gpu_blocks")
    knobs["num_blocks"] = knobs["num_gpu_blocks_arg"] - (config.variant != "seed")
    return knobs


def _prompt(request: RecordingLine) -> Prompt:
    """Read a prompt; arrival timestamps are in milliseconds, and only their order matters."""
    tokens, shared = request["prompt_tokens"], request.get("prefix_len", 0)
    segments = tuple(Segment(*segment) for segment in request.get("segments", ()))
    if shared:
        own = Segment(f"u{request['id']}", 0, tokens - shared)
        segments = (Segment(f"g{request['prefix_group']}", 0, shared), own)
    return Prompt(
        id=request["id"],
        prompt_tokens=tokens,
        max_tokens=request["output_tokens"],
        arrival=request["timestamp"],
        has_images=request["has_images"],
        segments=segments,
    )


def _shown(prompt: Prompt) -> RecordingLine:
    return {
        "timestamp": prompt.arrival,
        "has_images": prompt.has_images,
        "segments": [list(segment) for segment in prompt.segments],
    }


def _decide(scheduler: MistralrsScheduler) -> tuple[Batch, RecordingLine]:
    batch = scheduler.schedule()
    return batch, {"free_blocks_sched": scheduler.free_blocks}


RECORDING = RecordingFormat(_config, _prompt, _knobs, _shown, decide=_decide, crash_line=True)
