"""Defaults that ``vllm serve`` derives from the release, the GPU and the model.

Source: the wheels since 0.9.0. ``vllm serve`` uses the defaults of
``UsageContext.OPENAI_API_SERVER``; the class ``LLM`` has different ones.

- ``max_num_batched_tokens``, ``max_num_seqs``: ``vllm/engine/arg_utils.py``, in
  ``EngineArgs._set_default_args_v1`` (0.9 and 0.10), ``_set_default_args`` (0.11), and from 0.12 on
  ``get_batch_defaults`` and ``_set_default_max_num_seqs_and_batched_tokens_args``.
- ``max_model_len``: ``_get_and_verify_max_len`` of ``vllm/config.py`` (0.9 and 0.10.0) and
  ``vllm/config/model.py``; the check that the cache can hold it is ``check_enough_kv_cache_memory``
  or, for ``auto``, ``_auto_fit_max_model_len`` of ``vllm/v1/core/kv_cache_utils.py``.
- ``block_size``: ``CudaPlatform.check_and_update_config`` (``vllm/platforms/cuda.py``, up to 0.17)
  and from 0.18 on ``Platform.update_block_size_for_backend`` (``vllm/platforms/interface.py``).

Not modelled: ``use_batched_dp_moe`` (256 tokens, from 0.20 on), which needs a non-default
all-to-all backend, and the performance mode ``throughput``, which needs a flag.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from simkv.core.engine_version import is_since, release_of_variant
from simkv.core.launcher_rules import (
    LaunchError,
    LaunchRules,
    LaunchTarget,
    ModelFacts,
)
from simkv.core.scheduler_protocol import blocks_for
from simkv.schedulers.vllm.config import VllmConfig
from simkv.schedulers.vllm.execution_settings import MAX_GRAPH_SIZE
from simkv.schedulers.vllm.versions import find_rules, find_variant

AUTO = "auto"

#: Rows of: minimum GPU memory in GiB, default tokens per step, default sequences per step, and the
#: release that introduced the row; largest GPU first.
LARGE: tuple[tuple[int, int, int, str], ...] = (
    (160, 16384, 1024, "0.28"),
    (70, 8192, 1024, "0.9"),
)
OTHERS = 2048, 256
#: First release that gives a GB10 the defaults of a small GPU, despite its large memory.
GB10_SMALL, GB10 = "0.33", (12, 1)
#: First patch releases that limit ``max_num_seqs`` to ``max_num_batched_tokens``, and
#: ``max_num_batched_tokens`` to ``max_num_seqs * max_model_len``.
SEQS_CAPPED, TOKENS_CAPPED = "0.10.1", "0.11.1"
#: Multimodal models that compute their largest item in one step, with the tokens of that item and
#: the first release whose token budget holds it. The item is a video of 32 frames of 78 tokens
#: (``get_mm_max_tokens_per_item`` in ``vllm/model_executor/models/gemma4_mm.py``).
ITEM_TOKENS, ITEM_SINCE = {"gemma4": 32 * 78}, "0.22"
#: RoPE types whose factor does not change ``max_position_embeddings``, and the first release that
#: adds YaRN to them; earlier releases multiply the original length by the factor.
UNSCALED = ("su", "longrope", "llama3", "default")
YARN, YARN_UNSCALED = ("yarn", "deepseek_yarn", "deepseek_llama_scaling"), "0.30"
#: The first release that uses the original training length for LongRoPE models.
LONGROPE_ORIGINAL = "0.11.1"
#: The release that introduced ``--max-model-len auto``.
FITS_ITSELF = "0.14"
#: Tokens per block for latent attention, by the major compute capability of the GPU and the first
#: release that uses the value. Hopper: FlashMLA, then FlashAttention; Blackwell: CUTLASS, then
#: FlashInfer.
LATENT_BLOCKS: Mapping[int, tuple[tuple[str, int], ...]] = {
    9: (("0.18", 16), ("0.9", 64)),
    10: (("0.18", 32), ("0.15", 64), ("0.10", 128)),
}
#: Tokens per block for sparse attention (an indexer selects tokens), and on Hopper for latent
#: attention with an fp8 cache (FlashMLA).
SPARSE_BLOCK = HOPPER_FP8_BLOCK = 64
DEFAULT_BLOCK = 16
#: Major compute capability of data center GPUs of the Blackwell family, the first release with
#: larger CUDA graphs on these GPUs, and the maximum number of tokens of these graphs
#: (``_set_cudagraph_sizes`` of ``vllm/config/vllm.py``).
BLACKWELL, LARGE_GRAPHS, LARGEST_GRAPH = 10, "0.28", 1024


def release_of(given: Mapping[str, Any]) -> str:
    """Return the release that the engine section of a scenario names."""
    # If ``variant`` has no patch number, the result is the recorded patch release that represents
    # it.
    name = str(given.get("variant", VllmConfig.variant))
    release = release_of_variant(name)
    return release if release.count(".") > 1 else release_of_variant(find_variant(name))


def before(given: Mapping[str, Any], machine: LaunchTarget) -> dict[str, Any]:
    """Return the default tokens per step, sequences per step and tokens per block.

    The result does not contain the settings that are in ``given``.
    """
    release = release_of(given)
    chosen: dict[str, Any] = {}
    if "block_size" not in given:
        chosen["block_size"] = _block_size(machine, release)
    tokens, seqs = _batch(machine, release)
    seqs = given.get("max_num_seqs", seqs)
    length = given.get("max_model_len")
    if not isinstance(length, int) and machine.model:
        length = model_length(machine.model, release)
    if "max_num_batched_tokens" not in given:
        tokens = _tokens(given, machine, release, (tokens, seqs, length))
        chosen["max_num_batched_tokens"] = tokens
    tokens = given.get("max_num_batched_tokens", tokens)
    if "max_num_seqs" not in given:
        capped = is_since(release, SEQS_CAPPED) and isinstance(tokens, int)
        chosen["max_num_seqs"] = min(seqs, tokens) if capped else seqs
    return chosen | _largest_graph(given, machine, release, given.get("max_num_seqs", seqs))


def _largest_graph(
    given: Mapping[str, Any], machine: LaunchTarget, release: str, seqs: Any
) -> dict[str, Any]:
    """Return ``max_cudagraph_capture_size`` if it is larger than on other GPUs."""
    blackwell = machine.capability is not None and machine.capability[0] == BLACKWELL
    if not blackwell or not is_since(release, LARGE_GRAPHS) or not isinstance(seqs, int):
        return {}
    stated = ("max_cudagraph_capture_size", "cudagraph_capture_sizes")
    if any(given.get(name) for name in stated) or given.get("cudagraph_mode") == "NONE":
        return {}
    drafts = given.get("num_speculative_tokens", 0)
    size = min(2 * seqs * (1 + drafts) if isinstance(drafts, int) else 0, LARGEST_GRAPH)
    return {"max_cudagraph_capture_size": size} if size > MAX_GRAPH_SIZE else {}


def _batch(machine: LaunchTarget, release: str) -> tuple[int, int]:
    gb10 = machine.capability == GB10 and is_since(release, GB10_SMALL)
    for gib, tokens, seqs, since in LARGE:
        # From 160 GiB on, the name of the GPU does not matter (get_batch_defaults).
        excluded = gib < 160 and ("a100" in machine.gpu.lower() or gb10)
        if machine.gib >= gib and is_since(release, since) and not excluded:
            return tokens, seqs
    return OTHERS


def _tokens(
    given: Mapping[str, Any], machine: LaunchTarget, release: str, base: tuple[int, Any, Any]
) -> int:
    tokens, seqs, length = base
    if isinstance(length, int) and given.get("enable_chunked_prefill") is False:
        tokens = max(tokens, length)
    if machine.model and is_since(release, ITEM_SINCE):
        tokens = max(tokens, ITEM_TOKENS.get(machine.model.model_type, 0))
    if is_since(release, TOKENS_CAPPED) and isinstance(length, int) and isinstance(seqs, int):
        tokens = min(tokens, seqs * length)
    return tokens


def model_length(model: ModelFacts, release: str) -> int:
    """Return the default of ``max_model_len`` for a model."""
    kind = model.rope_type
    if kind == "longrope" and is_since(release, LONGROPE_ORIGINAL) and model.rope_original:
        return model.rope_original
    if not kind or kind in UNSCALED or "gemma3" in model.model_type:
        return model.length
    if kind in YARN and is_since(release, YARN_UNSCALED):
        return model.length
    length = model.rope_original if kind == "yarn" and model.rope_original else model.length
    return int(length * model.rope_factor)


def _block_size(machine: LaunchTarget, release: str) -> int:
    model = machine.model
    if model is None or not model.latent_width or machine.capability is None:
        return DEFAULT_BLOCK
    if model.sparse:
        return SPARSE_BLOCK
    major = machine.capability[0]
    if major == 9 and machine.kv == "fp8":  # FlashAttention has no fp8 for latent attention
        return HOPPER_FP8_BLOCK
    rows = LATENT_BLOCKS.get(major, ())
    return next((size for since, size in rows if is_since(release, since)), DEFAULT_BLOCK)


def after(section: Mapping[str, Any], machine: LaunchTarget) -> dict[str, Any]:
    """Return ``max_model_len`` if the user has not set it.

    The value is the model's context length or, with ``auto``, the length that fits the KV cache.
    Raises LaunchError if the KV cache is too small for vLLM to start.
    """
    asked = section.get("max_model_len")
    if machine.model is None or asked not in (None, AUTO):
        return {}
    release = release_of(section)
    length = model_length(machine.model, release)
    fitting = longest(section, length)
    if fitting >= length or (section.get("startup_check") is False and asked is None):
        return {"max_model_len": length}
    fits_itself = is_since(release, FITS_ITSELF)
    if asked == AUTO and fits_itself and fitting > 1:
        return {"max_model_len": fitting}
    raise LaunchError(
        "max_model_len",
        f"vLLM {section.get('variant', VllmConfig.variant)} refuses to start: the KV cache of "
        f"{section['num_gpu_blocks']:,} blocks holds sequences of {fitting:,} tokens, less than "
        f"the {length:,} of {machine.model.name}; set max_model_len to at most {fitting:,}"
        + (", or to auto" if fits_itself and asked is None else ""),
    )


def longest(section: Mapping[str, Any], most: int) -> int:
    """Return the length in tokens of the longest sequence that the KV cache can hold.

    The result is at most ``most``.
    """
    # ``section`` contains the engine settings. If other settings are invalid, the result is
    # ``most``, because the validation of the section reports the error later.
    known = {field.name for field in fields(VllmConfig)}
    plain = {name: value for name, value in section.items() if name in known}
    try:
        loose = VllmConfig(**{**plain, "max_model_len": 2, "startup_check": False})
        if not all(isinstance(size, int) for size in (loose.block_size, loose.num_gpu_blocks)):
            return most
    except (TypeError, ValueError):
        return most
    usable = loose.num_gpu_blocks - (1 if find_rules(loose.variant).reserves_null_block else 0)

    def fits(length: int) -> bool:
        if loose.kv_cache_groups == (0,):
            return blocks_for(length, loose.block_size) <= usable
        return sum(loose.most_blocks(kind, length) for kind in loose.layer_kinds) <= usable

    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


LAUNCH = LaunchRules(
    before,
    after,
    longest,
    fields=(
        "num_gpu_blocks",
        "block_size",
        "max_model_len",
        "max_num_batched_tokens",
        "max_num_seqs",
        "enable_prefix_caching",
        "async_scheduling",
        "scheduler_reserve_full_isl",
        "gpu_memory_utilization",
        "cudagraph_mode",
        "max_cudagraph_capture_size",
    ),
    fitted=("max_model_len",),
)
