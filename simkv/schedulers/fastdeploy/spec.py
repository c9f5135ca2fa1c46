"""Engine spec of FastDeploy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from simkv.core.block_pool import BlockPool
from simkv.core.engine_spec import EngineSpec, TabledScheduler
from simkv.core.execution_settings import ExecutionSettings
from simkv.schedulers.fastdeploy.config import VARIANTS, FastDeployConfig
from simkv.schedulers.fastdeploy.recording import RECORDING

if TYPE_CHECKING:
    from simkv.schedulers.fastdeploy.scheduler import FastDeployScheduler

_FIXED = (
    "max_num_batched_tokens",
    "enc_dec_block_num",
    "prealloc_dec_block_slot_num_threshold",
    "reserve_init",
    "reserve_decay",
    "reserve_min",
)
_DECODE_ONLY = (
    "use_new_token_ratio_reserve",
    "min_new_token_ratio",
    "new_token_ratio_decay",
    "clip_max_new_tokens",
)
_RATIO = (
    "min_new_token_ratio_factor",
    "new_token_ratio_decay_steps",
    "clip_max_new_tokens_estimation",
    "chunked_prefill_size",
    "rem_input_tokens",
    "retract_decode_steps",
)


def _lacks(variant: str) -> tuple[str, ...]:
    """Return the options that no rule of a variant reads."""
    if variant.startswith("ratio"):
        return (*_FIXED, *_DECODE_ONLY)
    if variant == "decode-only-preempt":
        return _RATIO
    return ("init_new_token_ratio", *_DECODE_ONLY, *_RATIO)


def _build(config: FastDeployConfig) -> FastDeployScheduler:
    from simkv.schedulers.fastdeploy.scheduler import FastDeployScheduler  # imported on use

    return FastDeployScheduler(config)


def _with_tables(config: FastDeployConfig) -> TabledScheduler:
    scheduler = _build(config)
    pool = scheduler.manager.pool = BlockPool(scheduler.num_blocks)
    return TabledScheduler(scheduler, pool.tables)


def _setting(config: FastDeployConfig) -> ExecutionSettings:
    """Return the execution settings.

    FastDeploy runs without CUDA graphs. Scheduler, worker and token processor run in separate
    threads.
    """
    return ExecutionSettings(
        engine=config.name,
        release=config.variant,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_seqs=config.max_num_seqs,
        graph_mode="eager",
        asynchronous=True,
        block_size=config.block_size,
    )


FASTDEPLOY = EngineSpec(
    name="fastdeploy",
    config=FastDeployConfig,
    variants=VARIANTS,
    build=_build,
    build_with_tables=_with_tables,
    recording=RECORDING,
    setting=_setting,
    cache_lines=(r"total_block_num[=: ]+(?P<blocks>[\d,]+)",),
    cache_example="FastDeploy's 'total_block_num:2588'",
    memory="num_blocks",
    lacks={variant: _lacks(variant) for variant in VARIANTS},
    has_threads=True,
    unrecorded="aborts, which simkv ignores",
)
