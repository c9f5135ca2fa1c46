"""Recording format of TensorRT-LLM: one line per step."""

from __future__ import annotations

from dataclasses import asdict

from simkv.core.recording_format import RecordingFormat, RecordingLine
from simkv.core.request import Prompt, Segment
from simkv.schedulers.trtllm.config import TrtllmConfig


def _config(header: RecordingLine) -> TrtllmConfig:
    return TrtllmConfig(variant=header["variant"], **header["config"])


def _knobs(config: TrtllmConfig) -> RecordingLine:
    """Return the recorded options, except the memory fraction, whose only effect is the pool
    size.
    """
    knobs = asdict(config)
    for knob in ("name", "variant", "free_gpu_memory_fraction"):
        del knobs[knob]
    return knobs


def _prompt(request: RecordingLine) -> Prompt:
    return Prompt(
        id=request["id"],
        prompt_tokens=request["prompt_tokens"],
        max_tokens=request["max_tokens"],
        arrival=float(request["arrival_step"]),
        segments=tuple(Segment(*segment) for segment in request.get("segments", ())),
    )


def _shown(prompt: Prompt) -> RecordingLine:
    segments = [list(segment) for segment in prompt.segments]
    return {"max_tokens": prompt.max_tokens} | ({"segments": segments} if segments else {})


RECORDING = RecordingFormat(_config, _prompt, _knobs, _shown)
