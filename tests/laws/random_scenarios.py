"""Random small scenarios for every engine and variant that a scenario file can name.

Pools are small, so that requests are preempted, rejected and stuck. Lengths are short, so that a
run takes milliseconds. The law tests fail for an engine without an entry in ``KNOBS``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import simpy
from hypothesis import strategies as st

from simkv.core.engine_spec import EngineSpec
from simkv.core.engine_version import is_since
from simkv.core.policy_language import PolicyHook
from simkv.core.request import Request
from simkv.core.scheduler_protocol import Scheduler
from simkv.costs.cost_profile import load_profile
from simkv.costs.offload_link import OffloadLink
from simkv.costs.simulated_executor import SimulatedExecutor
from simkv.scenario.scenario import Scenario
from simkv.schedulers import engine_registry
from simkv.schedulers.mistralrs.policy_hooks import VARIANTS_WITHOUT_HOOKS
from simkv.schedulers.rule_fields import described_rules
from simkv.schedulers.sglang import versions as sglang_versions
from simkv.schedulers.vllm.release_knobs import ALL_GROUPS_SINCE
from simkv.schedulers.vllm.release_rules import VllmRules
from simkv.schedulers.vllm.spec import VLLM
from simkv.schedulers.vllm.versions import RULES, find_rules
from simkv.sim.client_loop import run_clients
from simkv.sim.engine import Engine
from simkv.sim.offload_copies import attach_copy_engine
from simkv.sim.replica_base import build_queue_limit
from simkv.sim.run_record import RunRecord
from simkv.workload.workload_section import generate_requests

Knobs = dict[str, Any]
Draw = Callable[[st.SearchStrategy[Any]], Any]


def _whole(low: int, high: int) -> st.SearchStrategy[int]:
    """Sample integers uniformly; ``st.integers`` prefers the ends of the range."""
    return st.sampled_from(range(low, high + 1))


def rarely(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Return ``strategy`` in one case of four, else None."""
    return st.sampled_from([False, False, False, True]).flatmap(
        lambda yes: strategy if yes else st.none()
    )


def _expression(seam: PolicyHook, depth: int) -> st.SearchStrategy[str]:
    """Return a random expression of a policy with at most ``depth`` levels."""
    leaf = st.sampled_from([*seam.names, *seam.names, "0", "1", "0.3", "7"])
    if not depth:
        return leaf
    inner = _expression(seam, depth - 1)
    forms = ["{} - {}", "{} * {}", "{} / ({})", "-({}) + {}", "min({}, {})", "1 if {} < {} else 0"]
    two = st.tuples(st.sampled_from(forms), inner, inner)
    return leaf | two.map(lambda one: f"({one[0].format(*one[1:])})")


def rules(engine: str) -> st.SearchStrategy[str]:
    """Return policies over some of the hooks of an engine."""
    seams = {seam.name: seam for seam in engine_registry.ENGINES[engine].policy_hooks}
    some = st.lists(st.sampled_from(sorted(seams)), min_size=1, max_size=3, unique=True)
    lines = some.flatmap(
        lambda names: st.tuples(
            *(_expression(seams[name], 2).map(f"{name} = {{}}".format) for name in names)
        )
    )
    return lines.map("; ".join)


def _mistralrs(draw: Draw, variant: str) -> Knobs:
    return {
        "block_size": draw(st.sampled_from([1, 2, 4, 8])),
        "num_gpu_blocks": draw(_whole(2, 40)),
        "max_num_seqs": draw(_whole(1, 6)),
        "prefix_caching": variant != "seed" and draw(st.booleans()),
        "waiting_timeout": draw(_whole(0, 6) | st.just(64)),
        "prefill_batch_max_seqs": draw(_whole(1, 4)),
        "prefill_batch_max_tokens": draw(_whole(8, 64)),
        "rule": None if variant in VARIANTS_WITHOUT_HOOKS else draw(rarely(rules("mistralrs"))),
    }


def _vllm(draw: Draw, variant: str) -> Knobs:
    block_size, usable = draw(st.sampled_from([1, 2, 4])), draw(_whole(8, 32))
    max_model_len = block_size * usable - draw(_whole(0, 3))
    max_num_seqs = draw(_whole(1, 6))
    chunked = draw(st.booleans()) or "enable_chunked_prefill" in find_rules(variant).fixed
    kinds = [[0, 3], [5], [0, 9, 9], [0, 3, 8], [0, "mamba"], [0, "mamba", "mamba"], ["mamba", 4]]
    kinds += [[0, "chunked-4"], ["chunked-8", 3], ["chunked-8"]]
    larger = block_size * draw(st.sampled_from([2, 3]))
    kinds += [[f"0/{larger}", 3], [0, f"9/{larger}", f"9/{larger}"], [5, f"0/{larger}", 8]]
    every_kind = is_since(variant, ALL_GROUPS_SINCE)
    kinds = kinds if every_kind else [[0, 3], [0, 9, 9]]
    groups = draw(rarely(st.sampled_from(kinds))) or [0]
    groups = [0] if "kv_cache_groups" in find_rules(variant).fixed else groups
    chunked |= "mamba" in groups
    least = max(max_num_seqs, block_size)  # states are stored for full blocks only
    policies = ["fcfs", "priority", *([] if find_rules(variant).skip_blocked else ["vtc"])]
    knobs = {
        "block_size": block_size,
        "num_gpu_blocks": (usable + any(groups)) * len(groups) + 1,
        "kv_cache_groups": groups,
        "max_model_len": max_model_len,
        "max_num_seqs": max_num_seqs,
        "max_num_active_seqs": draw(rarely(_whole(1, max_num_seqs))),
        "max_num_queued_reqs": draw(rarely(_whole(1, 6))),
        "max_num_queued_tokens": draw(rarely(_whole(1, 60))),
        "enable_chunked_prefill": chunked,
        "max_num_batched_tokens": draw(
            _whole(least if chunked else max(max_num_seqs, max_model_len), 200)
        ),
        "mamba_cache_mode": draw(st.sampled_from([None, None, "align", "all"])),
        "mamba_prefill_checkpoints": draw(st.booleans()),
        "prefix_cache_retention_interval": _interval(draw, block_size, groups),
        "max_num_scheduled_tokens": draw(rarely(_whole(1, 40))),
        "policy": draw(st.sampled_from(policies)),
        "enable_prefix_caching": draw(st.booleans()),
        "long_prefill_token_threshold": draw(rarely(_whole(block_size, max_model_len))) or 0,
        "long_prefill_token_threshold_adaptive": draw(st.booleans()),
        "scheduler_reserve_full_isl": draw(st.booleans()),
        "watermark": draw(st.sampled_from([0.0, 0.0, 0.05, 0.3])),
        "prefill_schedule_interval": draw(st.sampled_from([1, 1, 2, 3])),
        "async_scheduling": draw(st.booleans()),
        "enable_lora": draw(st.booleans()),
        "max_loras": draw(_whole(1, 2)),
        "max_cpu_loras": draw(rarely(_whole(2, 3))),
    }
    chunks = any(str(group).startswith("chunked") for group in groups)
    together = not chunks and ("mamba" not in groups or find_rules(variant).drafts_with_states)
    together &= every_kind or not any(groups)
    if together and "num_speculative_tokens" not in find_rules(variant).fixed:
        knobs |= _drafts(draw, variant, knobs)
    drafts = knobs.get("num_speculative_tokens", 0)
    seams = knobs["policy"] == "fcfs" and "rule" not in VLLM.lacks[variant] and not drafts
    knobs["rule"] = draw(rarely(rules("vllm"))) if seams else None
    drafts = drafts or any(groups) or knobs["rule"] or block_size == 1
    drafts = drafts or knobs["policy"] == "vtc"
    if not drafts and "num_cpu_blocks" not in find_rules(variant).fixed:
        knobs |= _host(draw, knobs)
    fixed = find_rules(variant).fixed.keys() - {"enable_prefix_caching", "num_cpu_blocks"}
    return {k: v for k, v in knobs.items() if k not in fixed}


def _interval(draw: Draw, block_size: int, groups: list[Any]) -> int | str | None:
    """Return a retention interval that vLLM accepts for these groups, or None."""
    chosen = draw(st.sampled_from([None, None, 0, "None", 1, 2, 3]))
    special = any(str(group)[0] != "0" and "chunked" not in str(group) for group in groups)
    if not isinstance(chosen, int) or not chosen:
        return chosen
    # a multiple of both block sizes; without a prefix cache, a block for states is longer
    return 6 * block_size * chosen if special and "mamba" not in groups else 0


def _host(draw: Draw, knobs: Knobs) -> Knobs:
    """Return settings for blocks in host memory, with compatible other settings, or no such
    blocks.
    """
    blocks = draw(st.sampled_from([0, 1, 2, 0, 1, 4, 0.3])) * knobs["num_gpu_blocks"]
    if int(blocks) == 0:
        return {}
    return {
        "num_cpu_blocks": int(blocks),
        "eviction_policy": draw(st.sampled_from(["lru", "arc"])),
        "secondary_tiers": draw(st.sampled_from([[], ["fs"]])),
        "enable_prefix_caching": True,
    }


def _drafts(draw: Draw, variant: str, knobs: Knobs) -> Knobs:
    """Return settings for speculative decoding, with compatible other settings, or none."""
    rules, drafts = find_rules(variant), draw(rarely(_whole(1, 4)))
    if not drafts:
        return {}
    sizes = any("/" in str(group) for group in knobs["kv_cache_groups"])
    methods = [name for name in rules.draft_methods if not sizes or name not in ("eagle", "mtp")]
    methods = list(rules.draft_methods) if rules.keys_cover_next_token else methods
    method = draw(st.sampled_from(methods))
    threshold = knobs["long_prefill_token_threshold"]
    more: Knobs = {
        "num_speculative_tokens": drafts,
        "speculative_method": method,
        "max_num_batched_tokens": knobs["max_num_batched_tokens"] + knobs["max_num_seqs"],
        "long_prefill_token_threshold": threshold if threshold > drafts else 0,
        "async_scheduling": knobs["async_scheduling"] and method in rules.async_draft_methods,
    }
    if "mamba" in knobs["kv_cache_groups"]:
        more["mamba_cache_mode"] = None
        interval = knobs["prefix_cache_retention_interval"]
        more["mamba_prefill_checkpoints"] = rules.keys_cover_next_token and not interval
    return more | ({"max_num_scheduled_tokens": None} if rules.reserves_draft_slots else {})


def _sglang(draw: Draw, variant: str) -> Knobs:
    page_size = draw(st.sampled_from([1, 2, 4]))
    recv_interval = draw(st.sampled_from([1, 1, 2, 5, 30]))
    knobs = {
        "page_size": page_size,
        "max_total_num_tokens": page_size * draw(_whole(10, 40)),
        "max_running_requests": draw(_whole(1, 8)),
        "max_queued_requests": draw(rarely(_whole(0, 4))),
        "chunked_prefill_size": draw(st.sampled_from([-1, 4, 8, 16])),
        "max_prefill_tokens": draw(_whole(1, 64)),
        "prefill_max_requests": draw(rarely(_whole(1, 3))),
        "schedule_policy": draw(st.sampled_from([*sglang_versions.RULES[variant].policies, "vtc"])),
        "disable_radix_cache": draw(st.booleans()),
        "disable_overlap_schedule": draw(st.booleans()),
        "enable_mixed_chunk": draw(st.booleans()),
        "prefill_decode_interval": draw(_whole(0, 2)),
        "prefill_decode_interval_min_bs": draw(_whole(0, 2)),
        "scheduler_recv_interval": recv_interval,
        "priority_scheduling_preemption_threshold": draw(st.sampled_from([0, 1, 10])),
        "disable_priority_preemption": draw(st.booleans()),
        "schedule_low_priority_values_first": draw(st.booleans()),
        "min_free_slots_delay": draw(rarely(_whole(1, 4))),
        "allow_auto_truncate": draw(st.booleans()),
        "enable_prefill_delayer": draw(st.booleans()),
        "prefill_delayer_max_delay_passes": draw(st.sampled_from([1, 3, 30])),
        "prefill_delayer_token_usage_low_watermark": draw(rarely(st.sampled_from([0.2, 0.5]))),
        "prefill_delayer_queue_min_ratio": draw(rarely(st.sampled_from([0.5, 1.0]))),
        "prefill_delayer_max_delay_ms": draw(rarely(st.just(2000.0))),
        "stream_interval": draw(st.sampled_from([1, 3])),
        "enable_lora": draw(st.booleans()),
        "max_loras_per_batch": draw(_whole(1, 3)),
        "lora_drain_wait_threshold": draw(st.sampled_from([0.0, 0.5, 4.0])),
        "schedule_conservativeness": draw(st.sampled_from([0.0, 0.3, 1.0])),
        "new_token_ratio_decay_steps": draw(st.sampled_from([1, 5, 600])),
        "retract_decode_steps": draw(_whole(0, 5)),
        "clip_max_new_tokens_estimation": draw(st.sampled_from([1, 8, 4096])),
        "in_batch_prefix_caching_check_threshold": draw(st.sampled_from([-1, 2, 32])),
        "in_batch_prefix_caching_deprioritize_threshold": draw(st.sampled_from([2, 32])),
        "lpm_aging_tokens_per_pass": draw(_whole(0, 8)) if variant.endswith("lpm-aging") else 0,
    }
    if knobs["schedule_policy"] == "shortest-prefill-first":
        knobs["disable_radix_cache"] = False
    if knobs["enable_prefill_delayer"]:
        knobs["disable_overlap_schedule"] = False
    if knobs["schedule_policy"] in ("fcfs", "lof"):
        knobs["enable_priority_scheduling"] = draw(st.booleans())
    if knobs.get("enable_priority_scheduling"):
        knobs["max_queued_requests"] = knobs["max_queued_requests"] or None
        knobs["retraction_policy"] = draw(st.sampled_from(["length", "priority"]))
    lacks = sglang_versions.RULES[variant].lacks
    return {knob: value for knob, value in knobs.items() if knob not in lacks}


def _fastdeploy(draw: Draw, variant: str) -> Knobs:
    max_num_seqs = draw(_whole(1, 5))
    return {
        "block_size": draw(st.sampled_from([2, 4, 8])),
        "num_blocks": draw(_whole(3, 24)),
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": draw(_whole(max(max_num_seqs, 4), 64)),
        "enc_dec_block_num": draw(_whole(1, 3)),
        "prealloc_dec_block_slot_num_threshold": draw(_whole(0, 12)),
        "reserve_init": draw(_whole(0, 4)),
        "reserve_decay": draw(st.sampled_from([0.025, 0.5, 2.0])),
        "use_new_token_ratio_reserve": draw(st.sampled_from([0, 1])),
        "new_token_ratio_decay": draw(st.sampled_from([0.001, 0.1])),
        "new_token_ratio_decay_steps": draw(st.sampled_from([1, 5, 600])),
        "clip_max_new_tokens": draw(st.sampled_from([8, 4096])),
        "clip_max_new_tokens_estimation": draw(st.sampled_from([8, 4096])),
        "chunked_prefill_size": draw(_whole(4, 32)),
        "rem_input_tokens": draw(_whole(8, 64)),
        "retract_decode_steps": draw(_whole(0, 5)),
        "idle_worker_sends_ack": draw(st.booleans()),
    }


def _trtllm(draw: Draw, _: str) -> Knobs:
    block_size, chunked = draw(st.sampled_from([1, 2, 4])), draw(st.booleans())
    pool = block_size * draw(_whole(8, 40))
    policies = ["GUARANTEED_NO_EVICT", "MAX_UTILIZATION", "MAX_UTILIZATION", "STATIC_BATCH"]
    return {
        "tokens_per_block": block_size,
        "max_tokens_in_paged_kv_cache": pool,
        "max_seq_len": draw(rarely(_whole(8, pool))),
        "max_batch_size": draw(_whole(1, 6)),
        "max_num_tokens": draw(_whole(4, 60)),
        "capacity_scheduler_policy": draw(st.sampled_from(policies)),
        "enable_chunked_prefill": chunked,
        "context_chunking_policy": draw(
            st.sampled_from(["FIRST_COME_FIRST_SERVED", "EQUAL_PROGRESS"])
        ),
        "disable_overlap_scheduler": draw(st.booleans()),
        "enable_block_reuse": draw(st.booleans()),
    }


#: Small values for the settings of every engine.
KNOBS: dict[str, Callable[[Draw, str], Knobs]] = {
    "mistralrs": _mistralrs,
    "vllm": _vllm,
    "sglang": _sglang,
    "fastdeploy": _fastdeploy,
    "trtllm": _trtllm,
}

#: Rules of vLLM that any scenario can reach; the other rules need settings that are sampled rarely.
COMMON_TOPICS = {"Steps", "Priority", "LoRA"}


def _variants(engine: EngineSpec) -> list[str]:
    """Return the variants with different decisions; among equal vLLM releases, only the newest."""
    if engine.name != "vllm":
        return list(engine.variants)
    decided = [
        name for name, rule in described_rules(VllmRules).items() if rule.topic in COMMON_TOPICS
    ]
    newest: dict[tuple[Any, ...], str] = {}
    for variant, rules in RULES.items():
        newest.setdefault(tuple(getattr(rules, rule) for rule in decided), variant)
    return list(newest.values())


#: All pairs of engine and variant with distinct decisions.
ENGINES: list[tuple[str, str]] = [
    (name, variant)
    for name, engine in engine_registry.ENGINES.items()
    for variant in _variants(engine)
]


def _request(draw: Draw, longest: int, images: bool, knobs: Knobs) -> dict[str, Any]:
    request: dict[str, Any] = {
        "arrival": draw(st.sampled_from([0.0, 0.0, 0.0, 0.3, 1.0, 2.5, 9.0, 40.0])),
        "prompt_tokens": draw(_whole(1, longest)),
        "output_tokens": draw(_whole(1, 16)),
        "priority": draw(_whole(0, 2)),
        "has_images": images and draw(st.booleans()),
        "ignore_eos": draw(st.booleans()),
    }
    if timeout := draw(rarely(st.sampled_from([0.5, 3.0, 12.0, 60.0]))):
        request["timeout"] = timeout
    if more := draw(rarely(_whole(1, 8))):
        request["max_tokens"] = request["output_tokens"] + more
    if knobs.get("num_speculative_tokens"):
        request["acceptance"] = draw(st.sampled_from([None, 0.0, 0.5, 1.0, [0.9, 0.4]]))
    if key := draw(rarely(st.sampled_from(["x", "y"]))):
        request["routing_key"] = key
    if client := draw(st.sampled_from([None, "p", "q"])):
        request["client"] = client
    if (since := draw(rarely(_whole(-1, 4)))) is not None:
        request["logprobs_from"] = since
    if knobs.get("enable_lora", False):
        request["lora"] = draw(st.sampled_from([None, "a", "b", "c"]))
    if group := draw(st.sampled_from([None, "a", "b"])):
        request["prefix_group"] = group
        request["prefix_tokens"] = draw(_whole(1, 16))
    return request


def _turns(draw: Draw, requests: list[dict[str, Any]], longest: int) -> list[dict[str, Any]]:
    """Return sessions whose prompts repeat all earlier turns, for host memory."""
    said: dict[str, int] = {}
    for turn, request in enumerate(requests):
        who = request["prefix_group"] = "abc"[turn % draw(st.sampled_from([3, 2]))]
        said[who] = min(said.get(who, 0) + draw(_whole(longest // 2, longest)), longest)
        request["prompt_tokens"] = request["prefix_tokens"] = said[who]
        request["arrival"] = turn * draw(st.sampled_from([30.0, 9.0, 0.5]))
    return requests


@st.composite
def scenarios(draw: Draw, engine: str, variant: str) -> Scenario:
    """Return a scenario of up to eight requests for one variant of an engine."""
    longest = draw(st.sampled_from([4, 12, 30]))
    images = bool(draw(rarely(st.just(1))))
    count = draw(_whole(1, 8))
    knobs = KNOBS[engine](draw, variant)
    requests = [_request(draw, longest, images, knobs) for _ in range(count)]
    if knobs.get("num_cpu_blocks") and draw(st.sampled_from([True] * 5 + [False])):
        longest = knobs["max_model_len"] - 4
        turns = [*requests, *(_request(draw, longest, images, knobs) for _ in range(4))]
        requests = _turns(draw, turns, longest)
    return Scenario.model_validate(
        {
            "name": "random",
            "workload": {"requests": requests},
            "engine": {"name": engine, "variant": variant, **knobs},
            "profile": draw(st.sampled_from(["unit-step", "l4-mistralrs-pr2034"])),
            "timeout": draw(rarely(st.just(100.0))),
            "horizon": draw(rarely(st.sampled_from([7.5, 30.0]))),
            "engine_ready": draw(rarely(st.just(0.4))) or 0.0,
        }
    )


_profile = lru_cache(load_profile)


@dataclass
class Run:
    """The requests, the scheduler and the record of a scenario that was run."""

    scenario: Scenario
    requests: list[Request]
    scheduler: Scheduler
    record: RunRecord


def let_copy(engine: Engine, scenario: Scenario) -> None:
    """Simulate the duration of copies to and from host memory, if the scenario has any."""
    if engine_registry.find_engine_spec(scenario.engine).offloads(scenario.engine):
        disk = OffloadLink(1.0, 10.0, 0.7, 30.0) if scenario.engine.secondary_tiers else None
        attach_copy_engine(engine, OffloadLink(1.0, bandwidth=20.0, latency=0.3), disk)


def run(scenario: Scenario, watch: Callable[[Scheduler], Any] = lambda scheduler: scheduler) -> Run:
    """Run a scenario; ``watch`` may wrap the scheduler before the engine receives it."""
    executor = SimulatedExecutor(_profile(scenario.profile))
    scheduler = engine_registry.build_scheduler(scenario.engine)
    requests = generate_requests(scenario.workload, scenario.timeout)
    engine = Engine(simpy.Environment(), watch(scheduler), executor, scenario.engine_ready)
    engine.queue_limit = build_queue_limit(scenario.engine)
    let_copy(engine, scenario)
    return Run(scenario, requests, scheduler, run_clients(engine, requests, scenario.horizon))
