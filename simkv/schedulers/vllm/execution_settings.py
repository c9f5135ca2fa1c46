"""Settings of vLLM that determine step durations and KV cache size."""

from __future__ import annotations

from simkv.core.engine_version import is_since, release_of_variant
from simkv.core.execution_settings import ExecutionSettings, GraphMode
from simkv.schedulers.vllm.config import VllmConfig

#: Default maximum number of tokens in a CUDA graph (vLLM 0.9 to 0.33, vllm/config). On data center
#: GPUs of the Blackwell family, it is larger since 0.28; see ``launcher_defaults``.
MAX_GRAPH_SIZE = 512
#: Before this release, ``max_num_seqs`` does not limit the sizes of CUDA graphs, and all sizes over
#: 4 tokens are multiples of 8 (``cuda_graph_sizes`` in ``vllm/config.py`` of 0.9.2).
GRAPHS_FOLLOW_SEQS = "0.10"

_MODES: dict[str, GraphMode] = {
    "FULL_AND_PIECEWISE": "full and piecewise",
    "FULL": "full",
    "FULL_DECODE_ONLY": "full decode only",
    "PIECEWISE": "piecewise",
    "NONE": "eager",
}


def graph_sizes(max_num_seqs: int, most: int | None = None, queries: int = 1) -> list[int]:
    """Return the default sizes of CUDA graphs in tokens, in ascending order.

    ``most`` is the setting ``max_cudagraph_capture_size``. ``queries`` is the number of tokens of a
    request in a decode step: one more than its draft tokens. Source: ``_set_cudagraph_sizes`` of
    ``vllm/config/vllm.py`` (0.19.1).
    """
    limit = min(2 * queries * max_num_seqs, MAX_GRAPH_SIZE) if most is None else most
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, limit + 1, 16)]
    return [size for size in sizes if size <= limit]


def _sizes(config: VllmConfig, release: str) -> list[int]:
    """Return the sizes of CUDA graphs of a release."""
    most = config.max_cudagraph_capture_size
    if config.cudagraph_capture_sizes:
        sizes = sorted(set(config.cudagraph_capture_sizes))
    elif most is None and not is_since(release, GRAPHS_FOLLOW_SEQS):
        sizes = [1, 2, 4, *range(8, MAX_GRAPH_SIZE + 1, 8)]
    else:
        sizes = graph_sizes(config.max_num_seqs, most, 1 + config.num_speculative_tokens)
    return [size for size in sizes if size <= config.max_num_batched_tokens]


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
    return ExecutionSettings(
        engine=config.name,
        release=release,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_seqs=config.max_num_seqs,
        graph_sizes=() if mode == "NONE" else tuple(_sizes(config, release)),
        graph_mode=_MODES[mode],
        asynchronous=config.depth > 1,
        block_size=config.block_size,
        memory_share=share,
        draft_layers=int(config.num_speculative_tokens > 0 and config.speculative_method == "mtp"),
    )
