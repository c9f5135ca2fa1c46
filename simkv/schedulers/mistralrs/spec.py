"""Engine spec of mistral.rs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from simkv.core.block_pool import BlockPool
from simkv.core.engine_spec import EngineSpec, TabledScheduler
from simkv.core.execution_settings import ExecutionSettings
from simkv.schedulers.mistralrs.config import MistralrsConfig
from simkv.schedulers.mistralrs.policy_hooks import POLICY_HOOKS, VARIANTS_WITHOUT_HOOKS
from simkv.schedulers.mistralrs.recording import RECORDING
from simkv.schedulers.mistralrs.versions import JULY_RULES, RULES, VARIANTS, MistralrsRules

if TYPE_CHECKING:
    from simkv.schedulers.mistralrs.scheduler_base import MistralrsScheduler

#: Options that only variants with a ``prefill_limit`` read.
PREFILL_LIMITS = ("prefill_batch_max_seqs", "prefill_batch_max_tokens")


def build(config: MistralrsConfig, rules: MistralrsRules | None = None) -> MistralrsScheduler:
    """Build the scheduler of ``config.variant``, optionally with other ``rules``.

    The variant ``seed`` ignores ``rules``.
    """
    if config.variant == "seed":
        from simkv.schedulers.mistralrs.pre_bucket_scheduler import PreBucketScheduler

        return PreBucketScheduler(config)
    if config.rule:
        from simkv.schedulers.mistralrs.custom_policy import BucketedExpressionScheduler

        return BucketedExpressionScheduler(config, rules)
    from simkv.schedulers.mistralrs.scheduler import (  # imported only if this engine runs
        BucketedScheduler,
        SingleLengthScheduler,
    )

    return (SingleLengthScheduler if config.variant == "pr2034july" else BucketedScheduler)(
        config, rules
    )


def _with_tables(config: MistralrsConfig) -> TabledScheduler:
    scheduler = build(config)
    scheduler.pool = BlockPool(scheduler.num_blocks)
    return TabledScheduler(scheduler, scheduler.pool.tables)


def _setting(config: MistralrsConfig) -> ExecutionSettings:
    """Return the execution settings: unchunked prompts, no CUDA graphs, no overlap of steps."""
    return ExecutionSettings(
        engine=config.name,
        release=config.variant,
        max_num_batched_tokens=config.prefill_batch_max_tokens,
        max_num_seqs=config.max_num_seqs,
        graph_mode="eager",
        asynchronous=False,
        block_size=config.block_size,
    )


MISTRALRS = EngineSpec(
    name="mistralrs",
    config=MistralrsConfig,
    caches_prefixes=lambda config: bool(config.prefix_caching),
    variants=VARIANTS,
    build=build,
    build_with_tables=_with_tables,
    recording=RECORDING,
    setting=_setting,
    cache_lines=(r"with block size (?P<size>\d+) and (?P<blocks>[\d,]+) GPU blocks",),
    cache_example="mistral.rs's 'and 2588 GPU blocks'",
    memory="num_gpu_blocks",
    lacks={
        variant: (
            *(("prefix_caching",) if variant == "seed" else ()),
            *(("rule",) if variant in VARIANTS_WITHOUT_HOOKS else ()),
            *(() if variant in RULES and RULES[variant].prefill_limit else PREFILL_LIMITS),
        )
        for variant in VARIANTS
    },
    rules=RULES,
    rules_read={"pr2034july": JULY_RULES},
    policy_hooks=POLICY_HOOKS,
    unrecorded="`mixed_decode` of pr2034 and pr2031a",
)
