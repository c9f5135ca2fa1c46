"""The modules of vLLM that are loaded from its real code, and the stubs of its other modules."""

from __future__ import annotations

import contextlib
import logging
import mmap
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from simkv.native.import_stubs import ConfigStub, SourceFinder, stub_imports

CORE = "vllm.v1.core."
CONNECTOR_PACKAGE = "vllm.distributed.kv_transfer.kv_connector.v1"
#: Modules outside of ``CORE`` that are loaded from vLLM's code.
REAL_MODULES = {
    "vllm.v1.request",
    "vllm.v1.kv_cache_interface",
    "vllm.v1.kv_cache_layout",
    "vllm.v1.kv_cache_spec_registry",
    "vllm.distributed.kv_transfer.kv_connector.utils",
    *(CONNECTOR_PACKAGE + "." + m for m in ("base", "offloading_connector")),
    *(
        CONNECTOR_PACKAGE + ".offloading." + m
        for m in ("common", "config", "scheduler", "events", "metrics")
    ),
    *(CONNECTOR_PACKAGE + ".nixl." + m for m in ("connector", "metadata", "scheduler")),
    *(CONNECTOR_PACKAGE + ".nixl." + m for m in ("base_scheduler", "pull_scheduler")),
    CONNECTOR_PACKAGE + ".nixl_connector",
    *("vllm.v1.kv_offload." + m for m in ("base", "config", "factory", "cpu.spec")),
    *("vllm.v1.kv_offload.cpu." + m for m in ("common", "manager")),
    *("vllm.v1.kv_offload.cpu.policies." + m for m in ("base", "factory", "lru", "arc")),
    *("vllm.v1.kv_offload.tiering." + m for m in ("base", "spec", "manager", "factory", "metrics")),
    *("vllm.v1.kv_offload.tiering." + m for m in ("async_lookup", "backpressure")),
    *("vllm.v1.kv_offload.tiering.fs." + m for m in ("manager", "thread_pool", "io")),
    "vllm.v1.kv_offload.file_mapper",
    "vllm.v1.metrics.cache_hit_source",
}
#: Modules and packages of vLLM that do not affect the decisions of released schedulers. Their stubs
#: can be used freely; a decision that uses any other stub of vLLM fails.
STUBBED_MODULES = {
    *("config", "distributed", "envs", "forward_context", "inputs", "logger", "lora", "outputs"),
    *(
        "attention",
        "compilation",
        "model_executor",
        "multimodal",
        "platforms",
        "transformers_utils",
    ),
    *("pooling_params", "sampling_params", "sequence", "tracing", "triton_utils", "_bc_linter"),
    *("utils." + m for m in ("collection_utils", "func_utils", "hashing", "import_utils")),
    *("utils." + m for m in ("jsontree", "math_utils", "mem_utils", "network_utils")),
    *("utils." + m for m in ("mem_constants", "platform_utils", "system_utils", "torch_utils")),
    *("v1." + m for m in ("attention", "engine", "executor", "hisparse", "kv_hints", "kv_offload")),
    *("v1." + m for m in ("metrics", "outputs", "pool", "sample", "serial_utils", "spec_decode")),
    *("v1." + m for m in ("structured_output", "utils", "worker")),
    *("v1.core." + m for m in ("encoder_cache_manager", "kv_cache_metrics")),
}
#: Compiled modules, which exist only in a build of vLLM; without them, vLLM uses Python code.
COMPILED_MODULES = ("vllm.fs_io_C",)
STUBBED_PACKAGES = (
    "vllm",
    "torch",
    "msgspec",
    "zmq",
    "cloudpickle",
    "transformers",
    "cbor2",
    "blake3",
)


def _logger(name: str) -> Any:
    logger = logging.Logger(name, logging.CRITICAL + 1)
    for level in ("debug_once", "info_once", "warning_once"):
        setattr(logger, level, lambda *_, **__: None)
    return logger


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)


def _length(tokens: list[int] | None, _: object) -> int:
    return len(tokens or ())


class _View:
    """A read-only view of a list."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __getitem__(self, key: Any) -> Any:
        return self.items[key]

    def __len__(self) -> int:
        return len(self.items)

    def copy(self) -> list[Any]:
        return self.items.copy()


class HostRegion:
    """Stub of vLLM's ``SharedOffloadRegion``: a buffer in host memory for ``num_chunks`` KV
    blocks.
    """

    BLOCK_SIZE_ALIGNMENT = 1

    def __init__(self, num_chunks: int, kv_bytes_per_chunk: int, **_: object) -> None:
        self._bytes = memoryview(mmap.mmap(-1, num_chunks * kv_bytes_per_chunk))
        self._shape = (num_chunks, kv_bytes_per_chunk)

    def create_kv_memoryview(self) -> memoryview:
        """Return a memory view of shape (number of blocks, bytes per block)."""
        return self._bytes.cast("B", self._shape)


#: Attributes of stub modules that need a real implementation.
STUB_ATTRIBUTES: Mapping[str, Mapping[str, Any]] = {
    "vllm.logger": {"init_logger": _logger},
    "vllm.utils": {"cdiv": _cdiv, "length_from_prompt_token_ids_or_embeds": _length},
    "vllm.utils.math_utils": {
        "cdiv": _cdiv,
        "round_down": lambda x, y: x // y * y,
        "round_up": lambda x, y: _cdiv(x, y) * y,
    },
    "vllm.v1.utils": {
        "ConstantList": _View,
        "record_function_or_nullcontext": lambda _: contextlib.nullcontext(),
    },
    "vllm.v1.structured_output.request": {
        "StructuredOutputRequest": SimpleNamespace(from_sampling_params=lambda _: None)
    },
    "vllm": {"envs": ConfigStub()},
    "vllm.envs": {"VLLM_PREFIX_CACHE_RETENTION_INTERVAL": None},
    "vllm.v1.kv_offload.cpu.shared_offload_region": {"SharedOffloadRegion": HostRegion},
    "vllm.v1.core.encoder_cache_manager": {"compute_encoder_budget": lambda **_: (0, 0)},
    "vllm.v1.engine": {
        name: type(name, (SimpleNamespace,), {})
        for name in ("EngineCoreOutput", "EngineCoreOutputs")
    },
}


def _is_stubbed(name: str) -> bool:
    """Return whether a module is in ``STUBBED_MODULES``, or outside of vLLM."""
    package, *parts = name.split(".")
    starts = {".".join(parts[:end]) for end in range(1, len(parts) + 1)}
    return package != "vllm" or not starts.isdisjoint(STUBBED_MODULES)


def _is_real(name: str) -> bool:
    return name in REAL_MODULES or (name.startswith(CORE) and not _is_stubbed(name))


def _is_known(name: str) -> bool:
    return _is_stubbed(name) or name in ("vllm", "vllm.utils", "vllm.v1", "vllm.v1.core")


class VllmFinder(SourceFinder):
    """Import hook that loads the deciding modules of vLLM from a folder."""

    def __init__(self, source: Path) -> None:
        super().__init__(source, STUBBED_PACKAGES, _is_real, STUB_ATTRIBUTES, _is_known)

    def find_spec(self, name: str, path: object, target: object = None) -> Any:
        if name in COMPILED_MODULES:
            raise ModuleNotFoundError(name)
        return super().find_spec(name, path, target)


def stub_vllm_imports(source: Path) -> AbstractContextManager[None]:
    """Return a context in which vLLM is imported from ``source``."""
    return stub_imports(VllmFinder(source))
