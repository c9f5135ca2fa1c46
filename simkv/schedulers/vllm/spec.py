"""vLLM's entry in the engine registry."""

from __future__ import annotations

from typing import TYPE_CHECKING

from simkv.core.engine_spec import (
    EngineSpec,
    KvTransferSpec,
    TabledScheduler,
    VariantNaming,
)
from simkv.core.errors import InputError
from simkv.core.scheduler_protocol import KvConnector
from simkv.schedulers.vllm.admission import build_admission_check, too_long
from simkv.schedulers.vllm.config import COST_KNOBS, VllmConfig
from simkv.schedulers.vllm.execution_settings import derive_settings, graph_sizes
from simkv.schedulers.vllm.launcher_defaults import LAUNCH
from simkv.schedulers.vllm.policy_hooks import POLICY_HOOKS
from simkv.schedulers.vllm.recording import RECORDING
from simkv.schedulers.vllm.release_knobs import ALL_GROUPS_SINCE
from simkv.schedulers.vllm.release_rules import VllmRules
from simkv.schedulers.vllm.server_options import BALANCER_S, CACHE_LINES, OPTIONS
from simkv.schedulers.vllm.versions import (
    RULES,
    VARIANTS,
    find_equivalent_release,
    find_rules,
    find_variant,
    unrecorded_note,
)

if TYPE_CHECKING:
    from simkv.schedulers.vllm.scheduler import VllmScheduler


def build(
    config: VllmConfig, rules: VllmRules | None = None, *, tables: bool = False
) -> VllmScheduler:
    """Build the scheduler of ``config.variant``, optionally with other ``rules``.

    With ``tables``, blocks have ids even if the config does not need them.
    """
    if config.offloads:
        from simkv.schedulers.vllm.offload_scheduler import VllmOffloadScheduler

        return VllmOffloadScheduler(config, rules, tables=tables)
    if config.kv_connector:
        from simkv.schedulers.vllm.transfer_scheduler import VllmTransferScheduler

        return VllmTransferScheduler(config, rules, tables=tables)
    if config.policy == "vtc":
        from simkv.schedulers.vllm.fair_queue import VllmFairScheduler

        return VllmFairScheduler(config, rules, tables=tables)
    if config.rule:
        from simkv.schedulers.vllm.custom_policy import VllmExpressionScheduler

        return VllmExpressionScheduler(config, rules, tables=tables)
    if config.retains:
        from simkv.schedulers.vllm.retaining_scheduler import VllmRetainingScheduler

        return VllmRetainingScheduler(config, rules, tables=tables)
    from simkv.schedulers.vllm.scheduler import VllmScheduler  # imported only if this engine runs

    return VllmScheduler(config, rules, tables=tables)


def _with_transfer(config: VllmConfig) -> KvConnector:
    from simkv.schedulers.vllm.transfer_scheduler import VllmTransferScheduler

    return VllmTransferScheduler(config)


def _with_tables(config: VllmConfig) -> TabledScheduler:
    chooses = config.policy == "priority" or config.rule is not None
    if chooses and not find_rules(config.variant).removes_victims:
        raise InputError(
            f"policy: with priority or a custom policy vLLM {config.variant} computes requests "
            "that have no blocks, which is impossible on a device; use fcfs"
        )
    if config.request_retention:
        raise InputError(
            "request_retention: not available on a device, because recordings of decisions contain "
            "no times; use a simulation"
        )
    if config.kv_cache_groups != (0,):
        raise InputError("kv_cache_groups: the GPU runner supports one group of layers; use [0]")
    if config.num_speculative_tokens:
        raise InputError("num_speculative_tokens: the GPU runner does not support drafts; use 0")
    if config.offloads:
        raise InputError("num_cpu_blocks: the GPU runner does not support offloading; use 0")
    scheduler = build(config, tables=True)
    assert scheduler.memory.tables is not None
    return TabledScheduler(scheduler, scheduler.memory.tables.tables)


VLLM = EngineSpec(
    name="vllm",
    config=VllmConfig,
    variants=VARIANTS,
    build=build,
    build_with_tables=_with_tables,
    recording=RECORDING,
    setting=derive_settings,
    cache_lines=CACHE_LINES,
    cache_example="vLLM's '# GPU blocks: 2588' or 'GPU KV cache size: 41,408 tokens'",
    memory="num_gpu_blocks",
    groups="kv_cache_groups",
    all_groups_since=ALL_GROUPS_SINCE,
    checkpoints="mamba_prefill_checkpoints",
    longest="max_model_len",
    lora="enable_lora",
    drafts="num_speculative_tokens",
    host=lambda config: config.offloads,
    host_blocks="num_cpu_blocks",
    lacks={
        variant: (*rules.fixed, *(("rule",) if rules.skip_blocked else ()))
        for variant, rules in RULES.items()
    },
    admission=build_admission_check,
    too_long=too_long,
    launch=LAUNCH,
    transfer=KvTransferSpec(
        tuple(name for name, rules in RULES.items() if "kv_connector" not in rules.fixed),
        VllmConfig.in_role,
        _with_transfer,
    ),
    naming=VariantNaming(find_variant, find_equivalent_release, unrecorded_note),
    policy_hooks=POLICY_HOOKS,
    has_negatable_flags=True,
    transfer_knobs=("kv_connector", "kv_role"),
    cost_knobs=COST_KNOBS,
    lora_knobs=("max_loras", "max_cpu_loras"),
    draft_knobs=("speculative_method",),
    graph_sizes=graph_sizes,
    unrecorded="checks and defaults at start-up; variants that are not releases",
    sizing="measured by release",
    states_in_blocks_since="0.21",
    memory_share="gpu_memory_utilization",
    rank_router={"router": "least_loaded", "refresh_interval": BALANCER_S},
    ranks_in_lockstep=True,
    disk=lambda config: bool(config.secondary_tiers),
    in_priority_order=lambda config: config.policy == "priority",
    caches_prefixes=lambda config: config.caches(find_rules(config.variant)),
    published_cache=lambda scheduler: scheduler.cache,
    published_cache_knob="enable_prefix_caching",
    server_options=OPTIONS,
)
