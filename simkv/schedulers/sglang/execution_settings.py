"""SGLang options that determine step durations and the size of the KV pool."""

from __future__ import annotations

from simkv.core.engine_version import release_of_variant
from simkv.core.execution_settings import ExecutionSettings
from simkv.schedulers.sglang.config import SglangConfig

#: Default of ``--cuda-graph-max-bs`` on large GPUs: maximum number of decodes in a CUDA graph.
MAX_GRAPH_SIZE = 512


def graph_sizes(max_running_requests: int) -> tuple[int, ...]:
    """Return the default batch sizes of CUDA graphs.

    Source: ``_generate_cuda_graph_batch_sizes`` of ``server_args.py`` (0.5).
    """
    # On smaller GPUs the largest size of the engine is smaller.
    limit = min(max_running_requests, MAX_GRAPH_SIZE)
    sizes = (1, 2, 4, 8, 12, *range(16, 257, 8), *range(272, MAX_GRAPH_SIZE + 1, 16))
    return tuple(size for size in sizes if size <= limit)


def derive_settings(config: SglangConfig) -> ExecutionSettings:
    """Return the settings that determine step durations."""
    # Only steps without prefills run as CUDA graphs.
    chunk = config.chunk
    return ExecutionSettings(
        engine=config.name,
        release=release_of_variant(config.variant),
        max_num_batched_tokens=chunk if chunk > 0 else config.max_prefill_tokens,
        max_num_seqs=config.rows,
        graph_sizes=graph_sizes(config.rows),
        graph_mode="full decode only",
        asynchronous=not config.disable_overlap_schedule,
        block_size=config.page_size,
        memory_share=config.mem_fraction_static,
    )
