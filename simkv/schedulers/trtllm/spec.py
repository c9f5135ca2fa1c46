"""Engine spec of TensorRT-LLM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from simkv.core.block_pool import BlockPool
from simkv.core.engine_spec import EngineSpec, TabledScheduler
from simkv.core.errors import InputError
from simkv.core.execution_settings import ExecutionSettings
from simkv.core.launcher_rules import LaunchRules, LaunchTarget
from simkv.schedulers.trtllm.config import VARIANTS, TrtllmConfig
from simkv.schedulers.trtllm.recording import RECORDING

if TYPE_CHECKING:
    from simkv.schedulers.trtllm.scheduler import TrtllmScheduler

#: Default batch sizes with a CUDA graph, up to ``max_batch_size``: 1 to 32, then 64 and 128
#: (``CudaGraphConfig`` without padding).
GRAPH_SIZES = (*range(1, 33), 64, 128)


def _build(config: TrtllmConfig) -> TrtllmScheduler:
    # imported only if this engine runs
    from simkv.schedulers.trtllm.scheduler import TrtllmScheduler

    return TrtllmScheduler(config)


def _with_tables(config: TrtllmConfig) -> TabledScheduler:
    if config.enable_block_reuse:
        raise InputError(
            "enable_block_reuse: the GPU runner does not copy parts of blocks; use false"
        )
    scheduler = _build(config)
    scheduler.cache.pool = BlockPool(config.num_blocks)
    return TabledScheduler(scheduler, scheduler.cache.pool.tables)


def _setting(config: TrtllmConfig) -> ExecutionSettings:
    """Return the execution settings; only decode-only steps run as CUDA graphs."""
    return ExecutionSettings(
        engine=config.name,
        release=config.variant,
        max_num_batched_tokens=config.max_num_tokens,
        max_num_seqs=config.max_batch_size,
        graph_sizes=tuple(size for size in GRAPH_SIZES if size <= config.max_batch_size),
        graph_mode="full decode only",
        asynchronous=not config.disable_overlap_scheduler,
        block_size=config.tokens_per_block,
        memory_share=config.free_gpu_memory_fraction,
    )


def _longest(given: Mapping[str, Any], machine: LaunchTarget) -> dict[str, Any]:
    """Return the default of ``max_seq_len``.

    ``trtllm-serve`` uses the model's context length.
    """
    if "max_seq_len" in given or machine.model is None:
        return {}
    return {"max_seq_len": machine.model.length}


def _too_long(config: TrtllmConfig, prompt_tokens: int) -> str | None:
    """Return why a prompt is rejected as too long, or None.

    The limits are the number of tokens of a step and the sequence length.
    """
    most = config.max_num_tokens
    if prompt_tokens > most and not config.enable_chunked_prefill:
        return f"prompt {prompt_tokens:,} > max_num_tokens {most:,}"
    if prompt_tokens < config.longest:
        return None
    pool = "" if config.longest == config.max_seq_len else ", which is max_tokens_in_paged_kv_cache"
    compared = ">" if prompt_tokens > config.longest else "="
    return f"prompt {prompt_tokens:,} {compared} max_seq_len {config.longest:,}{pool}"


TRTLLM = EngineSpec(
    name="trtllm",
    config=TrtllmConfig,
    caches_prefixes=lambda config: bool(config.enable_block_reuse),
    variants=VARIANTS,
    build=_build,
    build_with_tables=_with_tables,
    recording=RECORDING,
    setting=_setting,
    cache_lines=(r"max tokens in paged KV cache \((?P<tokens>[\d,]+)\)",),
    cache_example="TensorRT-LLM's 'for max tokens in paged KV cache (41408)'",
    memory="max_tokens_in_paged_kv_cache",
    memory_in_tokens=True,
    seats="max_batch_size",
    block="tokens_per_block",
    sizing="rest",
    unrecorded="the executor loop, requests and the block manager (the recorder used substitutes); "
    "requests that the server rejects",
    partly_recorded="its scheduler recorded",
    too_long=_too_long,
    launch=LaunchRules(before=_longest, fields=("max_tokens_in_paged_kv_cache", "max_seq_len")),
)
