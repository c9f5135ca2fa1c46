"""Recording format of SGLang's normal loop and overlap loop."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import TYPE_CHECKING

from simkv.core.recording_format import RecordingFormat, RecordingLine
from simkv.core.request import Prompt, Segment
from simkv.core.scheduler_protocol import Batch
from simkv.schedulers.sglang.config import SglangConfig

if TYPE_CHECKING:
    from simkv.schedulers.sglang.scheduler import SglangScheduler

#: Names of options in recordings, by option.
RECORDED_KNOB_NAMES = {
    "schedule_policy": "policy",
    "init_new_token_ratio": "init_new_token_ratio_base",
    "clip_max_new_tokens_estimation": "clip_max_new_tokens",
    "in_batch_prefix_caching_check_threshold": "in_batch_prefix_check_threshold",
    "in_batch_prefix_caching_deprioritize_threshold": "in_batch_prefix_deprioritize_threshold",
}
#: Boolean options that recordings store inverted.
INVERTED_KNOBS = {"disable_radix_cache": "radix_cache", "disable_overlap_schedule": "overlap"}


def _config(header: RecordingLine) -> SglangConfig:
    """Read the config of a recording; options missing in an older recording get their defaults."""
    recorded = header["config"]
    knobs: RecordingLine = {}
    for knob in (field.name for field in fields(SglangConfig)):
        if knob in INVERTED_KNOBS:
            knobs[knob] = not recorded[INVERTED_KNOBS[knob]]
        elif knob != "name" and (theirs := RECORDED_KNOB_NAMES.get(knob, knob)) in recorded:
            knobs[knob] = recorded[theirs]
    if knobs["chunked_prefill_size"] is None:
        knobs["chunked_prefill_size"] = -1
    return SglangConfig(**knobs)


def _knobs(config: SglangConfig) -> RecordingLine:
    knobs = asdict(config)
    del knobs["name"]
    for own, theirs in RECORDED_KNOB_NAMES.items():
        knobs[theirs] = knobs.pop(own)
    for own, theirs in INVERTED_KNOBS.items():
        knobs[theirs] = not knobs.pop(own)
    if knobs["chunked_prefill_size"] == -1:
        knobs["chunked_prefill_size"] = None
    return knobs


def _prompt(request: RecordingLine) -> Prompt:
    """Read a prompt with the client's output limit, before the scheduler clips it."""
    return Prompt(
        id=request["id"],
        prompt_tokens=request["prompt_tokens"],
        max_tokens=request["max_tokens_requested"],
        arrival=float(request["arrival_step"]),
        ignore_eos=request.get("ignore_eos", False),
        priority=request.get("priority", 0),
        segments=tuple(
            Segment(stream, start, start + tokens)
            for stream, start, tokens in request.get("segments", ())
        ),
        lora=request.get("lora"),
        routing_key=request.get("routing_key"),
        client=request.get("client"),
        logprobs_from=request.get("logprobs_from"),
    )


def _shown(prompt: Prompt) -> RecordingLine:
    return {
        "max_tokens_requested": prompt.max_tokens,
        "ignore_eos": prompt.ignore_eos,
        "segments": [[s.stream, s.start, s.end - s.start] for s in prompt.segments],
        **({"lora": prompt.lora} if prompt.lora else {}),
        **({"priority": prompt.priority} if prompt.priority else {}),
        **({"routing_key": prompt.routing_key} if prompt.routing_key else {}),
        **({"client": prompt.client} if prompt.client else {}),
        **({"logprobs_from": at} if (at := prompt.logprobs_from) is not None else {}),
    }


def _queues(scheduler: SglangScheduler) -> RecordingLine:
    memory = scheduler.state.memory
    return {
        "waiting": [r.id for r in scheduler.state.waiting],
        "running": scheduler.decode_ids(),
        "free_blocks": memory.free // memory.page_size,
    }


def _decide(scheduler: SglangScheduler) -> tuple[Batch, RecordingLine]:
    batch = scheduler.schedule()
    chunked = scheduler.state.chunked
    return batch, {"chunked": chunked and chunked.id, "prefix_lens": batch.context}


def _left(scheduler: SglangScheduler) -> RecordingLine:
    state = scheduler.state
    return {
        "new_token_ratio": state.ratio.current,
        "batch_is_full": state.running.full,
        "evictable": state.memory.evictable,
        "processed_tokens": state.processed_tokens,
    }


RECORDING = RecordingFormat(
    _config, _prompt, _knobs, _shown, queues=_queues, decide=_decide, left=_left, drains=True
)
