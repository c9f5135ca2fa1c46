"""Stubs for the imports of SGLang's scheduler that do not affect its decisions.

They support one rank, without speculative decoding and grammars.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

from simkv.core.errors import InputError
from simkv.native.import_stubs import ConfigStub, OneRank, SourceFinder, Stub, stub_imports

#: Modules and packages that are loaded from the release; all others are stubs.
REAL_MODULES = tuple(
    f"sglang.srt.{name}"
    for name in (
        "beam_search.batch_tail",
        "disaggregation.decode_schedule_batch_mixin",
        "disaggregation.utils",
        "dllm.mixin.req",
        "environ",
        "lora.lora_drainer",
        "managers",
        "mem_cache",
        "model_executor.forward_batch_info",
        "sampling",
        "utils.torch_memory_saver_adapter",
    )
)
#: Modules in these packages that are replaced by stubs nevertheless.
STUBBED_MODULES = (
    "managers.io_struct",
    "mem_cache.triton_ops.allocator",
    "sampling.sampling_batch_info",
)
STUBBED_PACKAGES = ("sglang", "sgl_kernel", "torchvision", "transformers", "xgrammar")


class SamplingBatchInfo(Stub):
    """Stub of the sampling parameters of a batch, which have no effect."""

    penalizer_orchestrator = SimpleNamespace(is_required=False)

    @classmethod
    def from_schedule_batch(cls, *_: Any, **__: Any) -> SamplingBatchInfo:
        return cls()

    def _missing(self, _: str) -> Any:
        return lambda *_, **__: None


#: Settings of SGLang; the recorder adds the settings of a case. Missing settings are off, as by
#: default.
SETTINGS: Any = ConfigStub(
    dict.fromkeys(("enable_mamba_extra_buffer", "enable_mamba_extra_buffer_lazy"), lambda: False),
    attn=ConfigStub(backend="torch_native"),
    features=ConfigStub(),
    mamba=ConfigStub(),
    disaggregation_mode="null",
    radix_eviction_policy="lru",
    is_config_namespace_published=lambda _: False,
)


PARALLEL_SETTINGS: Any = OneRank(num_dp_ranks=1, tp_group=ConfigStub())


class PrefillRange(NamedTuple):
    """Range of positions that a prefill computes."""

    start: int
    end: int

    @property
    def length(self) -> int:
        return self.end - self.start


def _flat(lists: list[Any], *_: Any) -> Any:
    import torch

    return torch.tensor([x for part in lists for x in part], dtype=torch.int64)


def _pages(
    seq_lens: Any, page_size: int, prefix_lens: Any = None, decode: bool = False, **_: Any
) -> int:
    """Return the number of new pages that requests of these lengths need."""
    before = seq_lens - 1 if decode or prefix_lens is None else prefix_lens
    up = (seq_lens + page_size - 1) // page_size
    return int((up - (before + page_size - 1) // page_size).sum())


class KernelStub:
    """A function that replaces a GPU kernel and ignores its launch grid."""

    def __init__(self, function: Callable[..., None]) -> None:
        self.function = function

    def __getitem__(self, _: object) -> Callable[..., None]:
        return self.function


def _places(
    prefix_lens: Any, seq_lens: Any, last: Any, free: Any, out: Any, _: int, size: int
) -> None:
    """Assign slots to new tokens, first in a request's last page, then in pages from ``free``."""
    pages, at = iter(free.tolist()), 0
    for start, end, place in zip(prefix_lens, seq_lens, last, strict=True):
        for position in range(int(start), int(end)):
            place = next(pages, 0) * size if position % size == 0 else place + 1
            out[at], at = place, at + 1


UTILITIES: dict[str, Any] = {
    "flatten_arrays_to_pinned_cpu": _flat,
    "flatten_arrays_to_int64_tensor": _flat,
    "ceil_align": lambda x, y: -(-x // y) * y,
    "ceil_div": lambda x, y: -(-x // y),
    "next_power_of_2": lambda n: 1 << max(n - 1, 0).bit_length(),
    "get_num_new_pages": _pages,
    "Range": PrefillRange,
    "is_pin_memory_available": lambda *_, **__: False,
}
STUB_ATTRIBUTES: dict[str, dict[str, Any]] = {
    "runtime_context": {
        # ``get_schedule`` and so on: all groups of settings are in one object
        "__getattr__": lambda _: lambda: SETTINGS,
        "get_parallel": lambda: PARALLEL_SETTINGS,
        "attention_backends": lambda: ("torch_native", "torch_native"),
    },
    "server_args": {"get_global_server_args": lambda: SETTINGS},  # older releases read this setting
    "sampling.sampling_batch_info": {"SamplingBatchInfo": SamplingBatchInfo},
    "mem_cache.triton_ops.allocator": {
        "alloc_extend_kernel": KernelStub(_places),
        "alloc_decode_kernel": KernelStub(lambda ends, *rest: _places(ends - 1, ends, *rest)),
    },
    "utils": UTILITIES,
    "utils.common": UTILITIES,
}


def _no_compile(function: Any = None, **_: Any) -> Any:
    """Return the function uncompiled; ``torch.compile`` needs triton."""
    return function or _no_compile


@contextlib.contextmanager
def stub_sglang_imports(source: Path) -> Iterator[None]:
    """Return a context in which SGLang is imported from ``source``."""
    try:
        import torch  # before its own packages are hidden
    except ImportError as error:
        raise InputError(
            "SGLang's scheduler needs torch, also without a GPU: pip install 'simkv[sglang]'"
        ) from error
    attributes = {f"sglang.srt.{name}": given for name, given in STUB_ATTRIBUTES.items()}
    stubbed = [f"sglang.srt.{name}" for name in STUBBED_MODULES]
    logger = logging.getLogger("sglang")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        with (
            patch.object(torch, "compile", _no_compile),
            stub_imports(SourceFinder(source, STUBBED_PACKAGES, REAL_MODULES, stubbed, attributes)),
        ):
            yield
    finally:
        logger.setLevel(level)
