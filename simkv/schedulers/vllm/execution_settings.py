"""Settings of vLLM that determine step durations and KV cache size."""

from __future__ import annotations

from simkv.core.engine_version import is_since, release_of_variant
from simkv.core.execution_settings import ExecutionSettings, GraphMode
from simkv.schedulers.vllm.config import VllmConfig
from simkv.schedulers.vllm.versions import find_rules

#: Default maximum number of tokens in a CUDA graph (vLLM 0.9 to 0.33, vllm/config).
MAX_GRAPH_SIZE = 512

_MODES: dict[str, GraphMode] = {
    "FULL_AND_PIECEWISE": "full and piecewise",
    "FULL": "full",
    "FULL_DECODE_ONLY": "full decode only",
    "PIECEWISE": "piecewise",
    "NONE": "eager",
}


def graph_sizes(max_num_seqs: int, most: int | None = None) -> list[int]:
    """Return the default sizes of CUDA graphs in tokens, in ascending order.

    ``most`` is the setting ``max_cudagraph_capture_size``. Source: ``cudagraph_capture_sizes`` in
    the configuration of vLLM 0.19.0.
    """
    # The configuration was recorded in a run with ``max_num_seqs`` 256.
    limit = min(2 * max_num_seqs, MAX_GRAPH_SIZE) if most is None else most
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, limit + 1, 16)]
    return [size for size in sizes if size <= limit]


def derive_settings(config: VllmConfig) -> ExecutionSettings:
    """Return the settings that determine step durations and KV cache size.

    Missing settings get the default of the release. Source: ``vllm/config``.
    """
    # CUDA graphs are piecewise up to 0.10; from 0.11.0 on, decode steps use full graphs. The
    # default of ``gpu_memory_utilization`` is 0.9 up to 0.19 and 0.92 from 0.20.0 on.
    release = release_of_variant(config.variant)
    default_mode = "FULL_AND_PIECEWISE" if is_since(release, "0.11") else "PIECEWISE"
    mode = config.cudagraph_mode or default_mode
    share = config.gpu_memory_utilization or (0.92 if is_since(release, "0.20") else 0.9)
    most = config.max_cudagraph_capture_size
    sizes = [
        s for s in graph_sizes(config.max_num_seqs, most) if s <= config.max_num_batched_tokens
    ]
    asynchronous = config.async_scheduling
    return ExecutionSettings(
        engine=config.name,
        release=release,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_seqs=config.max_num_seqs,
        graph_sizes=() if mode == "NONE" else tuple(sizes),
        graph_mode=_MODES[mode],
        asynchronous=(
            find_rules(config.variant).async_scheduling if asynchronous is None else asynchronous
        ),
        block_size=config.block_size,
        memory_share=share,
        draft_layers=int(config.num_speculative_tokens > 0 and config.speculative_method == "mtp"),
    )
