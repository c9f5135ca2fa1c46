"""Small random workloads on which the schedulers of vLLM are recorded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from math import lcm
from random import Random
from typing import Any

from simkv.conformance.record.case_sampling import (
    add_adapters,
    add_follow_ups,
    case_numbers,
    sample,
    sample_aborts,
    sample_durations,
    sample_requests,
    sample_settings,
)
from simkv.conformance.record.recording_case import CaseSchema, RecordingCase
from simkv.conformance.record.vllm_handmade_cases import HANDMADE_CASES
from simkv.core.engine_version import is_since
from simkv.core.recording_format import RecordingLine
from simkv.core.request import Request
from simkv.native.vllm.vllm_driver import NATIVE_VLLM
from simkv.schedulers.vllm.config import VllmConfig
from simkv.schedulers.vllm.layer_group_parser import CHUNKED
from simkv.schedulers.vllm.recording import RECORDING
from simkv.schedulers.vllm.release_knobs import ALL_GROUPS_SINCE
from simkv.schedulers.vllm.versions import find_rules

#: Settings whose choices do not depend on other settings.
SETTINGS: Mapping[str, tuple[Any, ...]] = {
    "enable_chunked_prefill": (True, True, True, False),
    "enable_prefix_caching": (True, True, True, False, False),
    "policy": ("fcfs", "priority"),
    "scheduler_reserve_full_isl": (True, True, True, True, False),
    "async_scheduling": (True, False),
    "watermark": (0.0, 0.0, 0.05, 0.3),
    "long_prefill_token_threshold_adaptive": (True, False),
    "prefill_schedule_interval": (1, 1, 2, 4),
}

#: Families of kinds: the setting that a release needs, the fraction of the number of plain cases
#: (as its inverse), and the kinds.
FAMILIES = (
    ("kv_cache_groups", 2, ("win", "mamba", "wingone", "mambagone")),
    ("kv_cache_groups", 4, ("chunk", "sizegone", "chunkgone", "size")),
    (
        "num_speculative_tokens",
        4,
        (
            *("spec", "specgone", "winspec", "winspecgone"),
            *("mambaspecgone", "mambaspec", "sizespec", "sizespecgone"),
        ),
    ),
    (
        "prefix_cache_retention_interval",
        4,
        ("winkept", "mambakept", "sizekept", "winspeckept", "mambaspeckept", "winkeptgone"),
    ),
    ("num_cpu_blocks", 4, ("tier", "tiergone")),
    ("secondary_tiers", 4, ("disk", "diskgone")),
    ("kv_connector", 4, ("pdload", "pdsend", "pdloadgone", "pdsendgone")),
)


def case_names(version: str, count: int) -> list[str]:
    """Return ``count`` names of basic cases of a release, and names of cases for its features."""
    variant = NATIVE_VLLM.variant_of(version)
    rules = find_rules(variant)
    dies_of_ties = not rules.breaks_ties_by_id and "policy" not in rules.fixed
    names = case_numbers(("rand", "gone", "lora", *(("tied",) if dies_of_ties else ())), count)
    for knob, inverse, kinds in FAMILIES:
        if knob not in rules.fixed:
            known = [kind for kind in kinds if _supports(variant, kind)]
            names += case_numbers(known, count // inverse) if known else []
    return names


def has_all_groups(version: str) -> bool:
    """Return whether layer groups of all kinds are modelled for a release."""
    return is_since(version, ALL_GROUPS_SINCE)


def _supports(version: str, kind: str) -> bool:
    """Return whether the layer groups of a kind are modelled for a release, also with drafts."""
    rules = find_rules(version)
    if kind.startswith(("mamba", "chunk", "size", "winspec")) and not has_all_groups(version):
        return False
    if kind.startswith("mambaspec"):
        return rules.drafts_with_states
    if kind.startswith("sizespec"):
        return rules.keys_cover_next_token
    return "kv_cache_groups" not in rules.fixed or not kind.startswith("winspec")


def handmade_names(version: str) -> list[str]:
    """Return the names of the ``HANDMADE_CASES`` whose config the release accepts."""
    rules = find_rules(NATIVE_VLLM.variant_of(version))
    return [name for name, made in HANDMADE_CASES.items() if made.exists(rules)]


def _config(draw: Random, variant: str) -> VllmConfig:
    """Return a config with a small KV cache, in a quarter of cases with a small token budget."""
    fixed = find_rules(variant).fixed
    block_size, usable = draw.choice([1, 2, 4, 4, 8]), draw.randint(6, 40)
    most = block_size * usable - draw.randint(0, block_size - 1)
    seqs = draw.randint(1, 12)
    knobs = sample_settings(draw, SETTINGS)
    least = seqs
    if "enable_chunked_prefill" not in fixed and not knobs["enable_chunked_prefill"]:
        least = max(seqs, most)
    large, small = range(least, most + 2 * seqs + 1), range(least, least + 2 * block_size + 1)
    budget = sample(draw, (small, large, large, large))
    thresholds = (0, 0, 0, range(1, min(most, 8) + 1))
    knobs["long_prefill_token_threshold"] = sample(draw, thresholds)
    knobs["max_num_active_seqs"] = sample(draw, (None, None, range(1, seqs + 1)))
    scheduled = (None, None, range(1, budget + block_size + 1))
    knobs["max_num_scheduled_tokens"] = sample(draw, scheduled)
    return VllmConfig(
        variant=variant,
        block_size=block_size,
        num_gpu_blocks=usable + 1,
        max_num_seqs=seqs,
        max_num_batched_tokens=budget,
        max_model_len=most,
        **{knob: value for knob, value in knobs.items() if knob not in fixed},
    )


def _layers(draw: Random, config: VllmConfig, kind: str) -> VllmConfig:
    """Return the config with layer groups (one of them special) and a scaled KV cache."""
    size = config.block_size
    windows = [draw.randint(2, 6 * size) for _ in range(2)]
    chunk = f"{CHUNKED}{size * draw.randint(1, 6)}"
    special = {"win": windows[1], "chunk": chunk, "mamba": "mamba"}[kind]
    several = (0, *[special] * draw.randint(1, 3))
    choices = [several, several, (special,), (0, special, windows[0])]
    groups: tuple[Any, ...] = draw.choice(
        choices if has_all_groups(config.variant) else choices[:2]
    )
    usable, most = config.num_gpu_blocks - 1, max(config.max_model_len // size, 1)
    blocks = usable * draw.randint(len(groups), 2 * len(groups)) // 2
    knobs = {}
    if kind == "mamba":
        knobs = _states(draw, config)
        blocks = draw.randint(most, 2 * most) + draw.randint(1, 2 * len(groups) + most)
    return replace(
        config, kv_cache_groups=groups, num_gpu_blocks=1 + blocks, startup_check=False, **knobs
    )


def _states(draw: Random, config: VllmConfig) -> dict[str, Any]:
    """Return the settings that layer groups with recurrent states need."""
    rules, size = find_rules(config.variant), config.block_size
    knobs: dict[str, Any] = {
        "mamba_cache_mode": draw.choice([None, None, "all"]),
        "mamba_prefill_checkpoints": draw.random() < 0.5,
    }
    knobs = {knob: value for knob, value in knobs.items() if knob not in rules.fixed}
    if config.enable_prefix_caching and not knobs.get("mamba_cache_mode"):
        if "enable_chunked_prefill" not in rules.fixed:
            knobs["enable_chunked_prefill"] = True
        if not rules.allows_large_state_blocks:
            threshold = config.long_prefill_token_threshold
            knobs["long_prefill_token_threshold"] = max(threshold, size) if threshold else 0
            knobs["max_num_batched_tokens"] = max(config.max_num_batched_tokens, size)
    return knobs


def _sizes(draw: Random, config: VllmConfig) -> VllmConfig:
    """Return the config with layer groups, some with larger blocks."""
    config = _layers(draw, config, "win")
    size = draw.choice([1, 1, 2, config.block_size])
    groups = [*config.kv_cache_groups]
    groups = [0, *groups] if len(groups) == 1 else groups
    times = {group: draw.choice([2, 2, 3, 4]) for group in dict.fromkeys(groups)}
    times[draw.choice(groups)] = 1
    sized = [f"{group}/{size * times[group]}" if times[group] > 1 else group for group in groups]
    return replace(
        config,
        block_size=size,
        num_gpu_blocks=config.num_gpu_blocks * max(config.block_size // size // 2, 1),
        kv_cache_groups=tuple(sized),
        enable_prefix_caching=draw.random() < 0.8,
    )


def _drafts(draw: Random, config: VllmConfig) -> VllmConfig:
    """Return the config with a drafter."""
    rules = find_rules(config.variant)
    # mtp is the same method as eagle
    method = draw.choice([name for name in rules.draft_methods if name != "mtp"])
    drafts = draw.randint(1, min(draw.choice([1, 3, 8]), config.max_model_len))
    slots = config.max_num_seqs if method == "draft_model" else 0
    budget = config.max_num_batched_tokens + draw.randint(slots, 2 * slots)
    threshold = config.long_prefill_token_threshold
    threshold = min(max(threshold, drafts + 1), config.max_model_len) if threshold else 0
    knobs: dict[str, Any] = {
        "num_speculative_tokens": drafts,
        "speculative_method": method,
        "max_num_batched_tokens": budget,
        "long_prefill_token_threshold": threshold if threshold > drafts else 0,
    }
    if method not in rules.async_draft_methods:
        knobs["async_scheduling"] = False
    if config.has_states:
        if config.mamba_cache_mode == "all":
            knobs |= {"mamba_cache_mode": None, "enable_prefix_caching": False}
        keeps = method != "eagle" or rules.keys_cover_next_token
        knobs["mamba_prefill_checkpoints"] = config.mamba_prefill_checkpoints and keeps
    if rules.reserves_draft_slots and "max_num_scheduled_tokens" not in rules.fixed:
        scheduled = (None, None, range(1, budget - slots + 1))
        knobs["max_num_scheduled_tokens"] = sample(draw, scheduled)
    return replace(config, **knobs)


def _retain(draw: Random, config: VllmConfig) -> VllmConfig:
    """Return the config with an interval at which windows and states stay in the prefix cache."""
    unit = lcm(*(kind.block_size for kind in config.layer_kinds))
    interval = unit * draw.choice([1, 2, 2, 3, 4, 7])
    if not config.caches(find_rules(config.variant)):
        interval = 0
    drafts = config.num_speculative_tokens > 0
    return replace(
        config,
        mamba_prefill_checkpoints=config.mamba_prefill_checkpoints and not drafts,
        prefix_cache_retention_interval=draw.choice([interval, interval, interval, "None"]),
    )


def _offload(draw: Random, config: VllmConfig, *, disk: bool) -> VllmConfig:
    """Return the config with KV blocks in host memory; with a disk, host memory is too small."""
    sizes = (range(1, 13), range(4, 25), range(8, 41)) if disk else (range(1, 9), range(4, 41), 200)
    return replace(
        config,
        block_size=max(config.block_size, 2),
        num_cpu_blocks=sample(draw, sizes),
        eviction_policy=draw.choice(["lru", "arc"]),
        secondary_tiers=("fs",) if disk else (),
        enable_prefix_caching=True,
    )


def _apart(draw: Random, config: VllmConfig, *, kv: str) -> VllmConfig:
    """Return the config of a replica that sends KV after prefill, or that loads KV to decode."""
    rules = find_rules(config.variant)
    role = {"send": "kv_producer", "load": "kv_consumer"}[kv]
    knobs: dict[str, Any] = {
        "kv_connector": "NixlConnector",
        "kv_role": draw.choice([role, role, "kv_both"]),
    }
    if not rules.skips_last_token_in_flight:
        knobs |= {"async_scheduling": False} if kv == "send" else {"kv_role": role}
    known = {knob: value for knob, value in knobs.items() if knob not in rules.fixed}
    return replace(config, **known)


def _adapters(draw: Random, config: VllmConfig) -> VllmConfig:
    return replace(config, enable_lora=True, max_loras=draw.randint(1, 3))


#: Functions that add a feature to a config, by a part of the kind of a case.
FEATURES: Mapping[str, Callable[[Random, VllmConfig], VllmConfig]] = {
    "lora": _adapters,
    "win": partial(_layers, kind="win"),
    "chunk": partial(_layers, kind="chunk"),
    "mamba": partial(_layers, kind="mamba"),
    "size": _sizes,
    "spec": _drafts,
    "kept": _retain,
    "tier": partial(_offload, disk=False),
    "disk": partial(_offload, disk=True),
    "pdsend": partial(_apart, kv="send"),
    "pdload": partial(_apart, kv="load"),
}


def make_case(version: str, name: str) -> RecordingCase:
    """Build the case with this name: a handmade case, or keys of ``FEATURES`` and a number.

    Cases whose kind ends with ``gone`` have aborts. In releases that do not order requests of equal
    priority and arrival, only ``tied-`` cases contain such requests.
    """
    base = NATIVE_VLLM.variant_of(version)
    if made := HANDMADE_CASES.get(name):
        return RecordingCase(VllmConfig(variant=base, **made.settings), [*made.requests])
    draw, kind = Random(f"{version} {name}"), name.split("-")[0]
    config = _config(draw, base)
    for word, add in FEATURES.items():
        if word in kind:
            config = add(draw, config)
    requests = sample_requests(draw, config.max_model_len - 1)
    rounds = 3 if config.secondary_tiers else int("tier" in kind or "size" in kind)
    for _ in range(rounds or draw.choice([0, 0, 1])):
        requests = add_follow_ups(draw, requests, config.max_model_len - 1)
    if config.enable_lora:  # more adapters than can run at a time
        names = "abcde"[: config.max_loras + draw.randint(0, 2)]
        requests = add_adapters(draw, requests, ["", *names])
    unique = kind != "tied" and not find_rules(base).breaks_ties_by_id
    lines = [_line(draw, config, request, unique=unique) for request in requests]
    for line in lines if config.kv_connector else ():
        _transfer(draw, line, "send" if "pdsend" in kind else "load")
    leave = kind.endswith("gone") or (kind == "lora" and draw.random() < 0.3)
    aborts = sample_aborts(draw, requests) if leave else ()
    return RecordingCase(config, lines, aborts, **_durations(draw, config))


def _line(draw: Random, config: VllmConfig, request: Request, *, unique: bool) -> RecordingLine:
    """Return a request with a priority and, with a drafter, the numbers of accepted drafts."""
    step, outputs = int(request.arrival), config.max_model_len - request.prompt_tokens
    request = replace(
        request,
        priority=draw.randint(0, 2),
        arrival=(step if draw.random() < 0.7 else draw.random() * step)
        + unique * request.id / 1000,
        output_tokens=min(request.output_tokens, outputs),
    )
    line = RECORDING.request_line(request, step)
    if drafts := config.num_speculative_tokens:
        line["accepts"] = [draw.randint(0, drafts) for _ in range(draw.randint(1, 9))]
    return line


def _durations(draw: Random, config: VllmConfig) -> dict[str, list[int]]:
    """Return the durations of copies and transfers that a case needs."""
    names = {
        "copies": config.num_cpu_blocks,
        "disk": config.secondary_tiers,
        "looks": config.secondary_tiers,
        "transfers": config.kv_connector,
    }
    choices = (0, 0, 1, 2, range(16))
    return {name: sample_durations(draw, choices) for name, used in names.items() if used}


def _transfer(draw: Random, line: RecordingLine, kv: str) -> None:
    """Make most requests send or load KV; the other replica decodes requests that send KV."""
    if draw.random() < 0.8:
        line["kv"] = kv
        if kv == "send":
            line["output_tokens"] = 1 if draw.random() < 0.9 else line["output_tokens"]
            line["max_tokens"] = line["output_tokens"]


CASE_SCHEMA = CaseSchema(
    case_names,
    make_case,
    kept={"name", "variant", "block_size", "num_gpu_blocks", "max_model_len"}
    # without these fields, requests cannot name the destination of their KV
    | {"kv_connector", "kv_role"},
    plain={"enable_prefix_caching": False, "async_scheduling": False},
    unnamed={"enable_lora", "max_cpu_loras", "speculative_method", "mamba_prefill_checkpoints"}
    | {"startup_check"},
    handmade=handmade_names,
)
