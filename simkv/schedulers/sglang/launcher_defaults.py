"""Defaults of SGLang's launcher for missing options, by release, GPU and model.

Source: the wheels 0.5.15, 0.5.20, 0.5.22 and 0.5.23:

- ``chunked_prefill_size``: ``_handle_gpu_memory_settings`` of ``srt/server_args.py`` (0.5.15) and
  ``handle_gpu_memory_settings`` of ``srt/arg_groups/memory_hook.py``. The same functions choose
  ``mem_fraction_static``, which ``costs/hardware/kv_capacity.py`` derives together with the pool.
- ``page_size``: set by the attention backend (``get_default_attn_backend``). It is 64 for
  TensorRT-LLM's backend on Blackwell (``_mla_backend_page_constraints`` in
  ``srt/arg_groups/overrides.py``) and for models with sparse attention
  (``model_overrides/deepseek_v2.py``).
- ``max_running_requests``: ``_resolve_max_num_reqs`` of ``srt/model_executor`` (0.5.15) and
  ``resolve_max_num_reqs`` of ``srt/mem_cache/kv_cache_configurator.py``, per rank of dp attention.
- ``max_prefill_tokens``: always 16384 (``ServerArgs``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from simkv.core.engine_version import is_since
from simkv.core.launcher_rules import LaunchRules, LaunchTarget, ModelFacts
from simkv.schedulers.sglang.config import SglangConfig

#: Pairs of GPU memory (GiB) and the default number of tokens per prefill pass on GPUs with less
#: memory.
CHUNKS = ((20, 2048), (35, 4096), (60, 4096), (160, 8192))
LARGEST_CHUNK = 16384
#: Before this release, the default on GPUs with 20 to 35 GiB is 2048.
CHUNK_RAISED, SMALL_CHUNK = "0.5.20", 2048
PREFILL_TOKENS = 16384
BLACKWELL, PAGE = 10, 64
#: Minimum and maximum number of running requests, and the number of running requests per
#: full-length sequence that fits into the pool.
ROWS, PER_SEQUENCE = (2048, 4096), 512


def before(given: Mapping[str, Any], machine: LaunchTarget) -> dict[str, Any]:
    """Return the defaults that SGLang chooses before it computes the pool size."""
    variant = str(given.get("variant", SglangConfig.variant))
    chosen: dict[str, Any] = {
        "page_size": _page(machine),
        "chunked_prefill_size": _chunk(machine.gib, variant),
        "max_prefill_tokens": PREFILL_TOKENS,
    }
    return {name: value for name, value in chosen.items() if name not in given}


def _chunk(gib: float, release: str) -> int:
    if 20 <= gib < 35 and not is_since(release, CHUNK_RAISED):
        return SMALL_CHUNK
    return next((chunk for below, chunk in CHUNKS if gib < below), LARGEST_CHUNK)


def _page(machine: LaunchTarget) -> int:
    sparse = machine.model is not None and machine.model.sparse
    blackwell = machine.capability is not None and machine.capability[0] == BLACKWELL
    return PAGE if sparse or blackwell else 1


def context_length(model: ModelFacts) -> int:
    """Return the context length of a model.

    Source: ``get_context_length`` of ``srt/utils/hf_transformers``.
    """
    scaled = model.rope_type not in ("", "llama3") and model.rope_original is None
    return int(model.length * model.rope_factor) if scaled else model.length


def after(section: Mapping[str, Any], machine: LaunchTarget) -> dict[str, Any]:
    """Return the default of ``max_running_requests`` for the size of the KV pool."""
    tokens, ranks = section.get("max_total_num_tokens"), section.get("dp_size", 1)
    if "max_running_requests" in section or machine.model is None:
        return {}
    if not isinstance(tokens, int) or not isinstance(ranks, int):
        return {}
    least, most = ROWS
    rows = int(tokens / context_length(machine.model) * PER_SEQUENCE)
    rows = min(max(min(rows, most), least), max(tokens // 2, 1))
    return {"max_running_requests": rows * ranks}


LAUNCH = LaunchRules(
    before,
    after,
    fields=(
        "max_total_num_tokens",
        "page_size",
        "chunked_prefill_size",
        "max_prefill_tokens",
        "max_running_requests",
        "mem_fraction_static",
    ),
)
