"""Small random workloads on which the scheduler of SGLang is recorded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import Any

from simkv.conformance.record.case_sampling import (
    GAPS,
    add_adapters,
    add_follow_ups,
    case_numbers,
    sample_aborts,
    sample_requests,
    sample_settings,
)
from simkv.conformance.record.recording_case import CaseSchema, RecordingCase
from simkv.core.request import Request, Segment
from simkv.native.sglang.sglang_driver import NATIVE_SGLANG
from simkv.schedulers.sglang.config import SglangConfig
from simkv.schedulers.sglang.recording import RECORDING
from simkv.schedulers.sglang.versions import RULES

#: Kinds of cases: plain, with aborts, with little memory, with LoRA adapters, with priorities, with
#: all features, with the prefill delayer, and with all queue policies.
KINDS = ("rand", "gone", "tight", "lora", "urgent", "whole", "delay", "order")

#: Settings for which additional recordings are kept if no other kept recording depends on them.
SHOWN_KNOBS = (
    "schedule_policy",
    "scheduler_recv_interval",
    "max_queued_requests",
    "min_free_slots_delay",
    "retraction_policy",
    "priority_scheduling_preemption_threshold",
    "disable_priority_preemption",
    "lora_drain_wait_threshold",
    "enable_prefill_delayer",
    "prefill_delayer_max_delay_passes",
    "prefill_delayer_token_usage_low_watermark",
    "prefill_delayer_queue_min_ratio",
    "prefill_delayer_max_delay_ms",
    "allow_auto_truncate",
)

#: Choices for the settings of a KV cache that fills up quickly. Sizes are rounded up to pages.
SETTINGS: Mapping[str, tuple[Any, ...]] = {
    "page_size": (1, 1, 2, 4, 16),
    "max_total_num_tokens": (range(40, 401),),
    "chunked_prefill_size": (-1, range(1, 49)),
    "max_running_requests": (range(1, 17),),
    "max_prefill_tokens": (16384, 16384, range(8, 201)),
    "prefill_max_requests": (None, None, None, range(1, 5)),
    "schedule_policy": ("fcfs", "fcfs", "lpm", "hrrn"),
    "disable_radix_cache": (True, False),
    "disable_overlap_schedule": (True, False),
    "enable_mixed_chunk": (True, False),
    "prefill_decode_interval": (0, 0, 0, 1, 3),
    "prefill_decode_interval_min_bs": (0, 2),
    "schedule_conservativeness": (0.0, 0.1, 0.3, 1.0),
    "min_new_token_ratio_factor": (0.0, 0.14),
    "new_token_ratio_decay_steps": (5, 600),
    "retract_decode_steps": (0, 3, 20),
    "clip_max_new_tokens_estimation": (8, 4096),
    "in_batch_prefix_caching_check_threshold": (2, 32),
    "in_batch_prefix_caching_deprioritize_threshold": (2, 32),
}
#: Choices with an overcommitted KV cache of a few dozen tokens.
TIGHT: Mapping[str, tuple[Any, ...]] = {
    "page_size": (1, 1, 1, 2, 4),
    "max_total_num_tokens": (range(20, 61),),
    "chunked_prefill_size": (-1, range(1, 17), range(1, 17)),
    "max_running_requests": (range(2, 9),),
    "max_prefill_tokens": (16384,),
    "prefill_max_requests": (None,),
    "schedule_policy": ("fcfs", "lpm", "hrrn"),
    "enable_mixed_chunk": (True, True, False),
    "prefill_decode_interval": (0,),
    "schedule_conservativeness": (0.0, 0.1, 0.3),
    "clip_max_new_tokens_estimation": (1, 8),
}
#: Settings of priority scheduling and of the waiting queue.
URGENT: Mapping[str, tuple[Any, ...]] = {
    "schedule_policy": ("fcfs", "fcfs", "lof"),
    "enable_priority_scheduling": (True, True, True, True, True, True, False),
    "schedule_low_priority_values_first": (True, False),
    "disable_priority_preemption": (True, False, False),
    "priority_scheduling_preemption_threshold": (0, 0, 1, 3),
    "max_running_requests": (1, 2, 3, 4, 9),
    "retraction_policy": ("length", "priority"),
    "min_free_slots_delay": (None, 2, 3, 20),
}
#: Settings of LoRA adapters; half of the cases have a drainer.
LORA: Mapping[str, tuple[Any, ...]] = {
    "enable_lora": (True,),
    "max_loras_per_batch": (1, 2, 3),
    "lora_drain_wait_threshold": (0.0, 0.0, 0.0, 0.5, 3.5, 10.5),
}
#: Settings of the prefill delayer.
DELAYER: Mapping[str, tuple[Any, ...]] = {
    "disable_overlap_schedule": (False,),
    "enable_prefill_delayer": (True,),
    "prefill_delayer_max_delay_passes": (2, 3, 30),
    "prefill_delayer_token_usage_low_watermark": (None, 0.1, 0.5),
    "prefill_delayer_queue_min_ratio": (None, 0.5, 1.0),
    "prefill_delayer_max_delay_ms": (None, 2000.0),
}
#: Settings for cases in which only the prefill delayer delays prompts.
DELAYED: Mapping[str, tuple[Any, ...]] = {
    **DELAYER,
    "max_total_num_tokens": (range(500, 8001),),
    "max_running_requests": (range(2, 7),),
    "max_prefill_tokens": (16384,),
}
#: All queue policies; releases have only some of them.
POLICIES = next(iter(RULES.values())).policies
#: Settings of the receiver, and all queue policies.
RECEIVER: Mapping[str, tuple[Any, ...]] = {
    "schedule_policy": POLICIES,
    "scheduler_recv_interval": (1, 1, 3, 20),
    "max_queued_requests": (None, range(1, 5)),
    "allow_auto_truncate": (True, False),
}
#: Settings for cases in which the queue policy decides.
ORDER: Mapping[str, tuple[Any, ...]] = {
    "schedule_policy": (*POLICIES, "routing-key"),
    "page_size": (1, 1, 2, 4),
    "chunked_prefill_size": (range(1, 25),),
    "max_running_requests": (range(2, 13),),
    "disable_radix_cache": (False,),
}
#: Tables that are added to ``SETTINGS``, and the fraction of cases in which they are, by kind.
ADDED: Mapping[str, Sequence[tuple[Mapping[str, tuple[Any, ...]], float]]] = {
    "tight": [(TIGHT, 1.0)],
    "lora": [(LORA, 1.0)],
    "urgent": [(TIGHT, 0.5), (URGENT, 1.0)],
    "whole": [(TIGHT, 0.5), (RECEIVER, 1.0), (URGENT, 0.5), (DELAYER, 0.6), (LORA, 0.3)],
    "delay": [(DELAYED, 1.0)],
    "order": [(ORDER, 1.0), (LORA, 0.3)],
}
#: Fraction of cases with aborts, by kind.
ABORTING = {"gone": 1.0, "tight": 0.4, "urgent": 0.4, "whole": 0.3, "order": 0.2}


def case_names(_: str, count: int) -> list[str]:
    """Return ``count`` names of random cases; the kinds alternate."""
    return case_numbers(KINDS, count)


def make_case(version: str, name: str) -> RecordingCase:
    """Build the case with this name, which consists of a kind in ``KINDS`` and a number."""
    draw, kind = Random(f"{version} {name}"), name.split("-")[0]
    config = _config(draw, NATIVE_SGLANG.variant_of(version), kind)
    room = config.max_total_num_tokens - max(2 * config.page_size + 2, 7)
    gaps = (0, 1, 1, 2, 3) if kind == "delay" else GAPS
    if config.max_total_num_tokens <= 64:
        requests = sample_requests(draw, room, (0, 0, 0, 1, 1, 2, 6), longest_outputs=(2, 6, 20))
    else:
        requests = sample_requests(draw, room, gaps)
    if draw.random() < 0.3:
        requests = add_follow_ups(draw, requests, room)
    if config.enable_lora:
        # With a drainer, every request has an adapter, because the drainer chooses among equal
        # requests in the order of a set, and the position of None in a set is random.
        names = [*"abcdef"[: config.max_loras_per_batch + draw.randint(0, 2)]]
        names += [] if config.lora_drain_wait_threshold else [""]
        requests = add_adapters(draw, requests, names)
    requests = [_decorated(draw, r, config, whole=kind == "whole") for r in requests]
    # Aborts are received between iterations, before (phase 0) or after (phase 1) the arrivals.
    leave = draw.random() < ABORTING.get(kind, 0.0)
    aborts = sample_aborts(draw, requests, phases=2) if leave else ()
    lines = [RECORDING.request_line(request, int(request.arrival)) for request in requests]
    return RecordingCase(config, lines, aborts)


def _config(draw: Random, release: str, kind: str) -> SglangConfig:
    """Return a random config of a kind."""
    choices, rules = {**SETTINGS}, RULES[release]
    for table, fraction in ADDED.get(kind, ()):
        choices |= table if draw.random() < fraction else {}
    policies = [p for p in choices["schedule_policy"] if p in rules.policies]
    knobs = sample_settings(draw, {**choices, "schedule_policy": policies or ["fcfs"]})
    page = knobs["page_size"]
    for size in ("max_total_num_tokens", "chunked_prefill_size"):
        if knobs[size] > 0:
            knobs[size] = -(-knobs[size] // page) * page
    if not knobs.get("enable_priority_scheduling"):
        knobs["retraction_policy"] = "length"
    if knobs["schedule_policy"] == "shortest-prefill-first":
        knobs["disable_radix_cache"] = False
    known = {knob: value for knob, value in knobs.items() if knob not in rules.lacks}
    return SglangConfig(**{"variant": release, **known})


def _decorated(draw: Random, request: Request, config: SglangConfig, *, whole: bool) -> Request:
    """Return the request with a priority and a routing key, or other fields with ``whole``."""
    if config.enable_priority_scheduling:
        request = replace(request, priority=draw.randint(0, 4))
    if config.schedule_policy == "routing-key":
        request = replace(request, routing_key=draw.choice(["", "x", "y", "z"]) or None)
    length = request.prompt_tokens
    if whole and draw.random() < 0.25:
        since = draw.choice([-1, -1, 0, length // 2, length + 1])
        request = replace(request, logprobs_from=since)
    longer = config.max_total_num_tokens - draw.randint(0, 8) - length
    if whole and longer > 0 and draw.random() < 0.08:
        more = Segment(f"long{request.id}", 0, longer)
        request = replace(
            request, prompt_tokens=length + longer, segments=(*request.segments, more)
        )
    return request


CASE_SCHEMA = CaseSchema(
    case_names,
    make_case,
    kept={"name", "variant", "page_size", "max_total_num_tokens"},
    plain={"disable_radix_cache": True, "disable_overlap_schedule": True},
    shown=SHOWN_KNOBS,
)
