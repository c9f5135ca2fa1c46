"""The modules of vLLM that are loaded from its real code, and the stubs of its other modules."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from simkv.native.import_stubs import ConfigStub, SourceFinder, stub_imports
from simkv.schedulers.vllm.config import VllmConfig
from simkv.schedulers.vllm.versions import find_rules

CORE = "vllm.v1.core."
CONNECTOR_PACKAGE = "vllm.distributed.kv_transfer.kv_connector.v1"
#: Modules and packages that are loaded from the release; all others are stubs.
REAL_MODULES = (
    "vllm.v1.core",
    "vllm.v1.kv_cache_interface",
    "vllm.v1.kv_cache_layout",
    "vllm.v1.kv_cache_spec_registry",
    "vllm.v1.kv_offload",
    "vllm.v1.metrics.cache_hit_source",
    "vllm.v1.request",
    "vllm.v1.structured_output.request",
    "vllm.v1.utils",
    "vllm.utils.math_utils",
    "vllm.distributed.kv_transfer.kv_connector.utils",
    *(f"{CONNECTOR_PACKAGE}.{name}" for name in ("base", "offloading", "offloading_connector")),
    *(f"{CONNECTOR_PACKAGE}.{name}" for name in ("nixl", "nixl_connector")),
)
#: Modules and packages of vLLM that do not affect the decisions of released schedulers. Their stubs
#: can be used freely; a decision that uses any other stub of vLLM fails.
STUBBED_MODULES = (
    *("vllm." + m for m in ("_bc_linter", "attention", "compilation", "config", "distributed")),
    *("vllm." + m for m in ("envs", "forward_context", "inputs", "logger", "lora", "outputs")),
    *("vllm." + m for m in ("model_executor", "multimodal", "platforms", "pooling_params")),
    *("vllm." + m for m in ("sampling_params", "sequence", "tracing", "transformers_utils")),
    *("vllm." + m for m in ("triton_utils", "usage")),
    *("vllm.utils." + m for m in ("collection_utils", "func_utils", "hashing", "import_utils")),
    *("vllm.utils." + m for m in ("jsontree", "mem_constants", "mem_utils", "network_utils")),
    *("vllm.utils." + m for m in ("platform_utils", "system_utils", "torch_utils")),
    *("vllm.v1." + m for m in ("attention", "engine", "executor", "hisparse", "kv_hints")),
    *("vllm.v1." + m for m in ("metrics", "outputs", "pool", "sample", "serial_utils")),
    *("vllm.v1." + m for m in ("spec_decode", "structured_output", "worker")),
    "vllm.v1.kv_offload.cpu.shared_offload_region",
    *("torch", "transformers"),
)
STUBBED_PACKAGES = ("vllm", "torch", "transformers")


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)


def _length(tokens: list[int] | None, _: object) -> int:
    return len(tokens or ())


class HostRegion:
    """Stub of ``SharedOffloadRegion``: a buffer for ``num_chunks`` KV blocks."""

    BLOCK_SIZE_ALIGNMENT = 1

    def __init__(self, num_chunks: int, kv_bytes_per_chunk: int, **_: object) -> None:
        self._bytes = memoryview(mmap.mmap(-1, num_chunks * kv_bytes_per_chunk))
        self._shape = (num_chunks, kv_bytes_per_chunk)

    def create_kv_memoryview(self) -> memoryview:
        """Return a memory view of shape (number of blocks, bytes per block)."""
        return self._bytes.cast("B", self._shape)


def speculation_fields(config: VllmConfig) -> dict[str, Any]:
    """Return the fields of vLLM's configuration that depend on speculative decoding."""
    drafts, method = config.num_speculative_tokens, config.speculative_method
    eagle = config.drafts_from_states
    covers = find_rules(config.variant).keys_cover_next_token and config.enable_prefix_caching
    speculative = ConfigStub(
        method=method,
        num_speculative_tokens=drafts,
        use_eagle=lambda: eagle,
        use_eagle_block_drop=lambda: eagle,
        needs_eagle_block_drop=lambda: eagle,
        uses_draft_model=lambda: method == "draft_model",
        use_multi_module_mtp=lambda: False,
        use_dflash=lambda: False,
        use_dspark=lambda: False,
        max_num_new_slots_for_drafting=config.draft_slots,
    )
    return {
        "num_speculative_tokens": drafts,
        "num_lookahead_tokens": 0 if method == "ngram" else drafts,
        "num_prefill_lookahead_tokens": int(eagle),
        "num_hash_lookahead_tokens": int(eagle and bool(covers)),
        "speculative_config": speculative if drafts else None,
    }


#: Attributes of stub modules that need a real implementation.
STUB_ATTRIBUTES: Mapping[str, Mapping[str, Any]] = {
    "vllm.utils": {"cdiv": _cdiv, "length_from_prompt_token_ids_or_embeds": _length},
    "vllm": {"envs": ConfigStub()},
    "vllm.envs": {"__getattr__": lambda _: None},
    "vllm.v1.kv_offload.cpu.shared_offload_region": {"SharedOffloadRegion": HostRegion},
}


def stub_vllm_imports(source: Path) -> AbstractContextManager[None]:
    """Return a context in which vLLM is imported from ``source``."""
    stubs = STUBBED_PACKAGES, REAL_MODULES, STUBBED_MODULES, STUB_ATTRIBUTES
    return stub_imports(SourceFinder(source, *stubs, strict=True))
