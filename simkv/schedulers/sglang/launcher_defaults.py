"""What SGLang's launcher chooses for settings that were not given, by release, GPU and model.

Read from the wheels 0.5.15, 0.5.20, 0.5.22 and 0.5.23:

- ``chunked_prefill_size``: ``_handle_gpu_memory_settings`` of ``srt/server_args.py`` (0.5.15) and
  ``handle_gpu_memory_settings`` of ``srt/arg_groups/memory_hook.py``; ``mem_fraction_static``, too,
  which ``costs/hardware/kv_capacity.py`` derives with the pool.
- ``page_size``: the attention backend's (``get_default_attn_backend``), of which TensorRT-LLM's on
  Blackwell needs 64 (``_mla_backend_page_constraints`` in ``srt/arg_groups/overrides.py``), and 64
  where an indexer selects tokens (``model_overrides/deepseek_v2.py``).
- ``max_running_requests``: ``_resolve_max_num_reqs`` of ``srt/model_executor`` (0.5.15) and
  ``resolve_max_num_reqs`` of ``srt/mem_cache/kv_cache_configurator.py``, per rank of dp attention.
- ``max_prefill_tokens``: 16384 for all (``ServerArgs``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from simkv.core.launcher_rules import LaunchRules, LaunchTarget, ModelFacts
from simkv.schedulers.sglang.config import SglangConfig

#: Tokens of a prefill pass by the GiB of a GPU below which they hold.
CHUNKS = ((20, 2048), (35, 4096), (60, 4096), (160, 8192))
LARGEST_CHUNK = 16384
#: The release before which a GPU of 20 to 35 GiB has 2048.
CHUNK_RAISED, SMALL_CHUNK = (0, 5, 20), 2048
PREFILL_TOKENS = 16384
BLACKWELL, PAGE = 10, 64
#: Fewest and most rows, and how many there are for a pool that holds one sequence of full length.
ROWS, PER_SEQUENCE = (2048, 4096), 512


def before(given: Mapping[str, Any], machine: LaunchTarget) -> dict[str, Any]:
    """Tokens of a prefill pass and tokens in a page."""
    variant = str(given.get("variant", SglangConfig.variant))
    release = tuple(int(part) for part in variant.partition("-")[0].split("."))
    chosen: dict[str, Any] = {
        "page_size": _page(machine),
        "chunked_prefill_size": _chunk(machine.gib, release),
        "max_prefill_tokens": PREFILL_TOKENS,
    }
    return {name: value for name, value in chosen.items() if name not in given}


def _chunk(gib: float, release: tuple[int, ...]) -> int:
    if 20 <= gib < 35 and release < CHUNK_RAISED:
        return SMALL_CHUNK
    return next((chunk for below, chunk in CHUNKS if gib < below), LARGEST_CHUNK)


def _page(machine: LaunchTarget) -> int:
    sparse = machine.model is not None and machine.model.sparse
    blackwell = machine.capability is not None and machine.capability[0] == BLACKWELL
    return PAGE if sparse or blackwell else 1


def context_length(model: ModelFacts) -> int:
    """The model's length: ``get_context_length`` of ``srt/utils/hf_transformers``."""
    scaled = model.rope_type not in ("", "llama3") and model.rope_original is None
    return int(model.length * model.rope_factor) if scaled else model.length


def after(section: Mapping[str, Any], machine: LaunchTarget) -> dict[str, Any]:
    """Rows for requests, by how many sequences of full length the pool holds."""
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
