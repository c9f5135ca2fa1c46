"""Engine spec of SGLang."""

from __future__ import annotations

from typing import Any

from simkv.core.engine_spec import EngineSpec, TabledScheduler, VariantNaming
from simkv.core.scheduler_protocol import Scheduler
from simkv.schedulers.sglang.config import SglangConfig
from simkv.schedulers.sglang.execution_settings import derive_settings
from simkv.schedulers.sglang.launcher_defaults import LAUNCH
from simkv.schedulers.sglang.recording import RECORDING
from simkv.schedulers.sglang.server_options import OPTIONS
from simkv.schedulers.sglang.versions import RULES, VARIANTS, find_variant


def _build(config: SglangConfig, **given: Any) -> Scheduler:
    # imported only if this engine runs
    from simkv.schedulers.sglang.scheduler import SglangScheduler

    return SglangScheduler(config, **given)


def _with_tables(config: SglangConfig) -> TabledScheduler:
    from simkv.schedulers.sglang.paged_memory import PagedMemory

    cache = not config.disable_radix_cache
    rules = RULES[config.variant]
    memory = PagedMemory(config.max_total_num_tokens, config.page_size, cache, rules)
    return TabledScheduler(_build(config, memory=memory), memory.tables)


def _too_long(config: SglangConfig, prompt_tokens: int) -> str | None:
    """Return why a prompt is too long for the KV pool, or None if it fits."""
    # ``request_intake.py`` has the rule.
    pool = config.max_total_num_tokens
    if prompt_tokens < pool - 6 or config.allow_auto_truncate:
        return None
    return f"prompt {prompt_tokens:,} > {pool - 7:,}, max_total_num_tokens {pool:,} less 7"


SGLANG = EngineSpec(
    name="sglang",
    config=SglangConfig,
    caches_prefixes=lambda config: not config.disable_radix_cache,
    variants=VARIANTS,
    build=_build,
    build_with_tables=_with_tables,
    recording=RECORDING,
    setting=derive_settings,
    cache_lines=(
        r"max_total_num_tokens=\s*(?P<tokens>[\d,]+)",
        r"KV Cache is allocated.*#tokens: (?P<tokens>[\d,]+)",
    ),
    cache_example="SGLang's 'max_total_num_tokens=41408'",
    memory="max_total_num_tokens",
    memory_in_tokens=True,
    lacks={
        name: (*rules.lacks, *(() if rules.lpm_aging else ("lpm_aging_tokens_per_pass",)))
        for name, rules in RULES.items()
    },
    seats="max_running_requests",
    block="page_size",
    stream="stream_interval",
    ranks="dp_size",
    lora="enable_lora",
    too_long=_too_long,
    lora_slots="max_loras_per_batch",
    lora_by_model=True,
    unrecorded="`empty_opens`; checks at start-up; variants that are not releases",
    sizing="static",
    step_tokens="chunked_prefill_size",
    memory_share="mem_fraction_static",
    rank_knobs=lambda groups: (
        {"enable_dp_attention": True, "dp_size": groups} if groups > 1 else {}
    ),
    logs_all_options=True,
    launch=LAUNCH,
    release_part=2,
    naming=VariantNaming(find_variant),
    server_options=OPTIONS,
)
