"""Small random workloads on which the scheduler of SGLang is recorded."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from simkv.conformance.record.recording_case import CaseSchema, RecordingCase, field_column
from simkv.core.recording_format import RecordingLine
from simkv.schedulers.sglang.config import SglangConfig
from simkv.schedulers.sglang.versions import RULES


def base_release(version: str) -> str:
    """Return the release whose settings are used for ``version``.

    This is ``version`` if it is known, and the newest known release if it is not.
    """
    return version if version in RULES else next(iter(RULES))


#: Kinds of cases: plain, with aborts, with little memory, with LoRA adapters, with priorities, with
#: all features, with the prefill delayer, and with each queue policy in turn.
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

#: Queue policies of the plain cases.
QUEUE_POLICIES = ("fcfs", "lpm", "hrrn")

#: Names of cases, by release, that show rules and settings which few cases show.
RARE = {
    "0.5.23": [
        "tight-1294",
        "tight-598",
        "tight-1544",
        "urgent-303",
        "urgent-022",
        "delay-300",
        "order-643",
    ],
    "0.5.22": ["tight-2498", "tight-1246", "tight-1946", "urgent-358", "delay-252", "order-048"],
    "0.5.20": [
        "tight-1931",
        "tight-1888",
        "tight-1555",
        "urgent-034",
        "urgent-010",
        "urgent-039",
        "delay-287",
    ],
    "0.5.15": ["tight-801", "tight-870", "tight-109", "urgent-328", "lora-012", "whole-271"],
}


def case_names(_: str, count: int) -> list[str]:
    """Return ``count`` names of random cases; the kinds of cases alternate."""
    return [f"{KINDS[i % len(KINDS)]}-{i // len(KINDS):03}" for i in range(count)]


def make_case(version: str, name: str) -> RecordingCase:
    """Build the case with this name, which consists of a kind in ``KINDS`` and a number."""
    draw, base = random.Random(f"{version} {name}"), base_release(version)
    kind, number = name.split("-")
    if kind == "order":
        return _ordered(draw, base, int(number))
    small = kind == "tight" or (kind in ("urgent", "whole") and draw.random() < 0.5)
    config = _tight(draw, base) if small else _config(draw, base)
    room = config.max_total_num_tokens - max(2 * config.page_size + 2, 7)
    requests = (_few if small else _requests)(draw, room)
    if kind == "lora":
        return _loras(RecordingCase(config, requests), draw)
    if kind == "whole":
        return _whole(draw, RecordingCase(config, requests))
    if kind == "delay":
        return RecordingCase(_delayed(draw, config), _first_together(draw, requests))
    if kind == "urgent":
        config = _urgent(draw, config)
        for request in requests:
            request["priority"] = draw.randint(0, 4)
    leave = kind == "gone" or (kind in ("tight", "urgent") and draw.random() < 0.4)
    return RecordingCase(config, requests, _aborts(draw, requests) if leave else ())


def _config(draw: random.Random, base: str) -> SglangConfig:
    """Return a config with a KV cache that fills up quickly."""
    page = draw.choice([1, 1, 1, 4, 16])
    pool = page * draw.randint(-(-40 // page), -(-400 // page))
    chunk = draw.choice([-1, page * draw.randint(1, -(-48 // page))])
    knobs: dict[str, Any] = {
        "variant": base,
        "max_running_requests": draw.randint(1, 16),
        "max_prefill_tokens": draw.choice([16384, 16384, draw.randint(8, 200)]),
        "prefill_max_requests": draw.choice([None, None, None, draw.randint(1, 4)]),
        "schedule_policy": draw.choice(["fcfs", "fcfs", "lpm", "hrrn"]),
        "disable_radix_cache": draw.random() < 0.5,
        "disable_overlap_schedule": draw.random() < 0.5,
        "enable_mixed_chunk": draw.random() < 0.4,
        "prefill_decode_interval": draw.choice([0, 0, 0, 1, 3]),
        "prefill_decode_interval_min_bs": draw.choice([0, 2]),
        "schedule_conservativeness": draw.choice([0.0, 0.1, 0.3, 1.0]),
        "min_new_token_ratio_factor": draw.choice([0.0, 0.14]),
        "new_token_ratio_decay_steps": draw.choice([5, 600]),
        "retract_decode_steps": draw.choice([0, 3, 20]),
        "clip_max_new_tokens_estimation": draw.choice([8, 4096]),
        "in_batch_prefix_caching_check_threshold": draw.choice([2, 32]),
        "in_batch_prefix_caching_deprioritize_threshold": draw.choice([2, 32]),
    }
    if knobs["schedule_policy"] not in RULES[base].policies:
        knobs["schedule_policy"] = draw.choice(
            [p for p in QUEUE_POLICIES if p in RULES[base].policies]
        )
    knobs = {knob: value for knob, value in knobs.items() if knob not in RULES[base].lacks}
    return SglangConfig(
        page_size=page,
        max_total_num_tokens=pool,
        chunked_prefill_size=chunk,
        **knobs,
    )


def _loras(case: RecordingCase, draw: random.Random) -> RecordingCase:
    """Return the case with LoRA adapters for most requests; there are more adapters than can run at
    a time.
    """
    most = draw.randint(1, 3)
    drains = draw.random() < 0.5
    # With a drainer, every request has an adapter, because the drainer chooses among equal requests
    # in the order of a set, and the position of None in a set is random.
    names = ["abcdef"[i] for i in range(most + draw.randint(0, 2))]
    names += [] if drains else [""]
    requests = [
        {**request, **({"lora": name} if (name := draw.choice(names)) else {})}
        for request in case.requests
    ]
    config = replace(
        case.config,
        enable_lora=True,
        max_loras_per_batch=most,
        lora_drain_wait_threshold=draw.choice([0.5, 3.5, 10.5]) if drains else 0.0,
    )
    return RecordingCase(config, requests)


def _tight(draw: random.Random, base: str) -> SglangConfig:
    """Return a config with an overcommitted KV cache of a few dozen tokens."""
    page = draw.choice([1, 1, 1, 2, 4])
    chunk = page * draw.randint(1, 8)
    knobs: dict[str, Any] = {
        "variant": base,
        "max_total_num_tokens": page * draw.randint(-(-20 // page), -(-60 // page)),
        "max_running_requests": draw.randint(2, 8),
        "chunked_prefill_size": draw.choice([-1, chunk, chunk]),
        "schedule_policy": draw.choice([p for p in QUEUE_POLICIES if p in RULES[base].policies]),
        "disable_radix_cache": draw.random() < 0.4,
        "disable_overlap_schedule": draw.random() < 0.5,
        "enable_mixed_chunk": draw.random() < 0.7,
        "schedule_conservativeness": draw.choice([0.0, 0.1, 0.3]),
        "retract_decode_steps": draw.choice([0, 3]),
        "clip_max_new_tokens_estimation": draw.choice([1, 8]),
        "in_batch_prefix_caching_deprioritize_threshold": draw.choice([2, 32]),
    }
    return SglangConfig(page_size=page, in_batch_prefix_caching_check_threshold=2, **knobs)


def _urgent(draw: random.Random, config: SglangConfig) -> SglangConfig:
    """Return the config with priority scheduling and other settings of the waiting queue."""
    first = draw.random() < 0.85
    knobs: dict[str, Any] = {
        "schedule_policy": draw.choice(["fcfs", "fcfs", "lof"]),
        "enable_priority_scheduling": first,
        "schedule_low_priority_values_first": draw.random() < 0.5,
        "disable_priority_preemption": draw.random() < 0.2,
        "priority_scheduling_preemption_threshold": draw.choice([0, 0, 1, 3]),
        "max_running_requests": draw.choice([1, 2, 3, 4, 9]),
        "retraction_policy": draw.choice(["length", "priority"] if first else ["length"]),
        "min_free_slots_delay": draw.choice([None, None, None, 2, 3, 20]),
    }
    lacks = RULES[config.variant].lacks
    return replace(config, **{k: v for k, v in knobs.items() if k not in lacks})


def _whole(draw: random.Random, case: RecordingCase) -> RecordingCase:
    """Return the case with the features of all other kinds, log probabilities and prompt
    truncation.
    """
    config, rules, more = case.config, RULES[case.config.variant], dict[str, Any]()
    if draw.random() < 0.4:
        config = _urgent(draw, config)
    else:
        more["schedule_policy"] = draw.choice(rules.policies)
    if draw.random() < 0.3:
        config = replace(config, enable_lora=True, max_loras_per_batch=draw.randint(1, 3))
    more |= {
        "scheduler_recv_interval": draw.choice([1, 1, 3, 20]),
        "max_queued_requests": draw.choice([None, None, draw.randint(1, 4)]),
        "allow_auto_truncate": draw.random() < 0.5,
        "enable_prefill_delayer": draw.random() < 0.5,
        "prefill_delayer_max_delay_passes": draw.choice([1, 3, 30]),
        "prefill_delayer_token_usage_low_watermark": draw.choice([None, 0.2, 0.5]),
        "prefill_delayer_queue_min_ratio": draw.choice([None, 0.5, 1.0]),
        "prefill_delayer_max_delay_ms": draw.choice([None, 2000.0]),
    }
    if more.get("schedule_policy") == "shortest-prefill-first":
        more["disable_radix_cache"] = False
    if more["enable_prefill_delayer"]:
        more["disable_overlap_schedule"] = False
    config = replace(config, **more)
    requests = [_decorated(draw, request, config) for request in case.requests]
    leave = draw.random() < 0.3
    return RecordingCase(config, requests, _aborts(draw, requests) if leave else ())


def _ordered(draw: random.Random, base: str, number: int) -> RecordingCase:
    """Return a case with one queue policy and small chunks.

    Prompts share a long common prefix or nothing.
    """
    rules, page = RULES[base], draw.choice([1, 1, 2, 4])
    policy = rules.policies[number % len(rules.policies)]
    knobs: dict[str, Any] = {
        "schedule_policy": policy,
        "page_size": page,
        "max_total_num_tokens": page * draw.randint(-(-40 // page), -(-300 // page)),
        "chunked_prefill_size": page * draw.randint(1, 12),
        "max_running_requests": draw.randint(2, 12),
        "prefill_decode_interval": draw.choice([0, 0, 1, 3, 5]),
        "disable_radix_cache": draw.random() < 0.1 and policy != "shortest-prefill-first",
    }
    known = {knob: value for knob, value in knobs.items() if knob not in rules.lacks}
    config = replace(_config(draw, base), **known)
    room = config.max_total_num_tokens - max(2 * page + 2, 7)
    common = draw.randint(1, max(room * 3 // 4, 1))
    requests = _requests(draw, room)
    for i, request in enumerate(requests):
        own = draw.randint(1, 6)
        if draw.random() < 0.5 and common + own <= room:
            request["prompt_tokens"] = common + own
            request["segments"] = [["g0", 0, common], [f"u{i}", 0, own]]
        if policy == "routing-key" and (key := draw.choice(["", "x", "y", "z"])):
            request["routing_key"] = key
    case = RecordingCase(config, requests, _aborts(draw, requests) if draw.random() < 0.2 else ())
    return _loras(case, draw)._replace(aborts=case.aborts) if draw.random() < 0.3 else case


def _delayed(draw: random.Random, config: SglangConfig) -> SglangConfig:
    """Return the config with few rows and much memory, so that only the prefill delayer delays
    prompts.
    """
    return replace(
        config,
        max_total_num_tokens=config.page_size * 500,
        max_running_requests=draw.randint(2, 6),
        max_prefill_tokens=16384,
        disable_overlap_schedule=False,
        enable_prefill_delayer=True,
        prefill_delayer_max_delay_passes=draw.choice([2, 3, 30]),
        prefill_delayer_token_usage_low_watermark=draw.choice([None, None, 0.1]),
        prefill_delayer_queue_min_ratio=draw.choice([None, 0.5, 1.0]),
        prefill_delayer_max_delay_ms=draw.choice([None, 2000.0]),
    )


def _first_together(draw: random.Random, requests: list[RecordingLine]) -> list[RecordingLine]:
    """Set the arrivals: three requests arrive together, then the others one at a time."""
    step = 0
    for i, request in enumerate(requests):
        step += 0 if i < 3 else draw.choice([0, 1, 1, 2, 3])
        request["arrival_step"] = step
    return requests


def _decorated(draw: random.Random, request: RecordingLine, config: SglangConfig) -> RecordingLine:
    """Return the request with more features; some prompts become longer than the KV cache."""
    more: RecordingLine = (
        {"priority": draw.randint(0, 4)} if config.enable_priority_scheduling else {}
    )
    if config.enable_lora and (name := draw.choice(["", "a", "b", "c"])):
        more["lora"] = name
    if config.schedule_policy == "routing-key" and (key := draw.choice(["", "x", "y", "z"])):
        more["routing_key"] = key
    length = request["prompt_tokens"]
    if draw.random() < 0.25:
        more["logprobs_from"] = draw.choice([-1, -1, 0, length // 2, length + 1])
    if draw.random() < 0.08:
        longer = config.max_total_num_tokens - draw.randint(0, 8) - length
        if longer > 0:
            more["prompt_tokens"] = length + longer
            more["segments"] = [*request["segments"], [f"long{request['id']}", 0, longer]]
    return {**request, **more}


def _requests(draw: random.Random, longest: int) -> list[RecordingLine]:
    """Return requests whose prompts leave space for an output; some prompts share a prefix."""
    requests: list[RecordingLine] = []
    step = 0
    for i in range(draw.randint(2, 14)):
        step += draw.choice([0, 0, 0, 1, 2, draw.randint(0, 30)])
        prompt = draw.randint(1, min(longest, draw.choice([8, 40, 120])))
        outputs = draw.randint(1, draw.choice([4, 20, 60]))
        common, to_the_end = draw.choice([0, draw.randint(0, prompt)]), draw.random() < 0.15
        pieces = [[draw.choice(["g0", "g1"]), 0, common], [f"u{i}", 0, prompt - common]]
        requests.append(
            {
                "id": i,
                "arrival_step": step,
                "prompt_tokens": prompt,
                "output_tokens": outputs,
                "max_tokens_requested": outputs + (0 if to_the_end else draw.choice([0, 0, 5, 40])),
                "ignore_eos": to_the_end,
                "segments": [piece for piece in pieces if piece[2]],
            }
        )
    return requests


def _few(draw: random.Random, longest: int) -> list[RecordingLine]:
    """Return short requests that arrive in quick succession."""
    requests, step = _requests(draw, longest)[:9], 0
    for request in requests:
        step += draw.choice([0, 0, 0, 1, 1, 2, 6])
        outputs = draw.randint(1, draw.choice([2, 6, 20]))
        more = 0 if request["ignore_eos"] else draw.choice([0, 0, 5, 40])
        request |= {"arrival_step": step, "output_tokens": outputs}
        request |= {"max_tokens_requested": outputs + more}
    return requests


def _aborts(draw: random.Random, requests: list[RecordingLine]) -> list[tuple[int, int, int]]:
    """Return aborts of about half of the requests, as tuples (step, phase, id).

    Aborts are received between iterations, before (phase 0) or after (phase 1) the arrivals.
    """
    leaving = [r for r in requests if draw.random() < 0.5]
    return sorted(
        (
            max(r["arrival_step"] + draw.randint(-1, 2 * r["output_tokens"]), 0),
            draw.randint(0, 1),
            r["id"],
        )
        for r in leaving
    )


def _cut(request: RecordingLine, tokens: int) -> RecordingLine:
    """Return the segments of a prompt that is shortened to ``tokens``."""
    segments = []
    for stream, start, count in request["segments"]:
        if tokens > 0:
            segments.append([stream, start, min(count, tokens)])
        tokens -= count
    return {"segments": segments}


CASE_SCHEMA = CaseSchema(
    kept={"name", "variant", "page_size", "max_total_num_tokens"},
    plain={"disable_radix_cache": True, "disable_overlap_schedule": True},
    cut=_cut,
    limit="max_tokens_requested",
    idle=("arrival_step", "priority"),
    columns={
        "request": field_column("id"),
        "before step": field_column("arrival_step"),
        "prompt": field_column("prompt_tokens"),
        "output": field_column("output_tokens"),
        "limit": field_column("max_tokens_requested"),
        "priority": lambda request: str(request.get("priority", 0)),
        "routing key": lambda request: request.get("routing_key", ""),
        "logprobs from": lambda request: str(request.get("logprobs_from", "")),
        "to the end": lambda request: "yes" if request["ignore_eos"] else "",
        "prompt is made of": lambda request: " ".join(
            f"{stream}[{start}:{start + count}]" for stream, start, count in request["segments"]
        ),
    },
)
