"""Stubs for the imports of vLLM's scheduler that do not affect its decisions.

The modules in ``REAL_MODULES`` (scheduler, KV cache manager, requests) are loaded unmodified from
the Python files of a released package. All other modules, such as torch and the model runner, are
stubs. The scheduler can therefore be imported in one second and without a GPU.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import logging
import mmap
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

CORE = "vllm.v1.core."
CONNECTOR_PACKAGE = "vllm.distributed.kv_transfer.kv_connector.v1"
REAL_MODULES = {
    *(CORE + "sched." + m for m in ("scheduler", "async_scheduler", "request_queue", "utils")),
    *(CORE + "sched." + m for m in ("output", "interface")),
    *(CORE + m for m in ("kv_cache_manager", "kv_cache_coordinator", "kv_cache_utils")),
    *(CORE + m for m in ("single_type_kv_cache_manager", "block_pool")),
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


class MissingImport(Exception):
    """A decision used a name of a package that is not installed and for which there is no stub."""


class AutoStub:
    """Stub of an unknown module or of a name in it; raises MissingImport if its value decides."""

    def __init__(self, name: str) -> None:
        self.__dict__["_stubbed"] = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return AutoStub(f"{self._stubbed}.{name}")

    def __call__(self, *args: Any, **_: object) -> Any:
        if len(args) == 1 and callable(args[0]):
            return args[0]  # used as a decorator
        return AutoStub(f"{self._stubbed}()")

    def __mro_entries__(self, _: object) -> tuple[type, ...]:
        return (ImportStub,)

    def __or__(self, other: object) -> Any:
        return object

    __ror__ = __or__

    def __enter__(self) -> AutoStub:
        return self

    def __exit__(self, *_: object) -> None: ...

    def __class_getitem__(cls, _: object) -> Any:
        return cls

    def _decides(self, *_: Any, **__: Any) -> Any:
        module, _dot, attribute = self._stubbed.partition(".")
        raise MissingImport(
            f"a decision needs {attribute or 'the module'} of {module}, which is not installed; "
            f"install {module}, or add a stub for it to simkv/native/import_stubs.py"
        )

    __bool__ = __len__ = __iter__ = __int__ = __float__ = __index__ = _decides
    __lt__ = __le__ = __gt__ = __ge__ = __add__ = __radd__ = __sub__ = __rsub__ = _decides
    __mul__ = __rmul__ = __floordiv__ = __truediv__ = __mod__ = __neg__ = _decides
    __contains__ = __setitem__ = __getitem__ = _decides
    __eq__ = _decides
    __hash__ = object.__hash__


class AutoStubFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Import hook that replaces packages that are not installed by stubs; must be the last.

    It applies to imports in the files of ``source``; installed packages handle theirs themselves.
    """

    def __init__(self, source: Path) -> None:
        self.source = str(source)

    def find_spec(self, name: str, _path: object, _target: object = None) -> Any:
        frame: types.FrameType | None = sys._getframe(1)
        while frame and "importlib" in frame.f_code.co_filename:
            frame = frame.f_back
        if frame and frame.f_code.co_filename.startswith(self.source):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return AutoStubModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        module.__path__ = []


class AutoStubModule(types.ModuleType):
    """Stub of a module that is not installed."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return AutoStub(f"{self.__name__}.{name}")


class ConfigStub:
    """A configuration object whose unset attributes are None."""

    def __init__(self, given: dict[str, Any] | None = None, **more: Any) -> None:
        self.__dict__.update(given or {})
        self.__dict__.update(more)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)


class StubType(type):
    """Metaclass of stub classes, which can be subclassed, subscripted and called."""

    def __new__(cls, name: str, bases: Any, space: Any, **_: object) -> Any:
        return super().__new__(cls, name, bases, space)

    def __init__(cls, name: str, bases: Any, space: Any, **_: object) -> None:
        super().__init__(name, bases, space)

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return StubType(name, (ImportStub,), {})

    def __getitem__(cls, key: object) -> type:
        return cls

    def __iter__(cls) -> Iterator[Any]:
        return iter(())

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and callable(args[0]) and not kwargs:
            return args[0]  # used as a decorator
        return super().__call__(*args, **kwargs)

    def __or__(cls, other: object) -> Any:
        return object

    __ror__ = __or__


class ImportStub(metaclass=StubType):
    """An object whose attributes are stubs and whose calls return None."""

    def __init__(self, *args: object, **kwargs: object) -> None: ...

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return ImportStub()

    def __call__(self, *args: Any, **_: object) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) else None

    def __bool__(self) -> bool:
        return False

    def __iter__(self) -> Iterator[Any]:
        return iter(())


class StubModule(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, StubType(name, (ImportStub,), {}))
        return self.__dict__[name]


@contextlib.contextmanager
def stub_imports(source: Path) -> Iterator[None]:
    """Within the context, import vLLM from ``source``; at the end, restore the previous imports."""
    finder, before = VllmStubFinder(source), {**sys.modules}
    for name in before:
        if name.split(".")[0] in STUBBED_PACKAGES:
            del sys.modules[name]
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.split(".")[0] in STUBBED_PACKAGES]:
            del sys.modules[name]
        sys.modules.update({k: v for k, v in before.items() if k.split(".")[0] in STUBBED_PACKAGES})


class VllmStubFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Import hook that loads ``REAL_MODULES`` from ``source`` and replaces all other modules by
    stubs.
    """

    def __init__(self, source: Path) -> None:
        self.source = source

    def find_spec(self, name: str, _path: object, _target: object = None) -> Any:
        file = self.source.joinpath(*name.split(".")).with_suffix(".py")
        if name in REAL_MODULES and file.exists():  # not every release has every module
            return importlib.util.spec_from_file_location(name, file)
        if name in COMPILED_MODULES:
            raise ModuleNotFoundError(name)
        if name.split(".")[0] in STUBBED_PACKAGES:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return StubModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Set the attributes of a stub module that need a real implementation."""
        real: dict[str, Any] = {
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
                n: type(n, (SimpleNamespace,), {})
                for n in ("EngineCoreOutput", "EngineCoreOutputs")
            },
        }
        module.__dict__.update(real.get(module.__name__, {}))
        module.__path__ = []


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


def name_of(number: int) -> str:
    """Return an engine's id of a request; ids have the order of their numbers."""
    return f"{number:08}"


def accepted_fields(kind: type, **arguments: Any) -> dict[str, Any]:
    """Return the entries of ``arguments`` that the constructor of ``kind`` accepts in this
    release.
    """
    known = {
        name
        for cls in kind.__mro__
        if "__init__" in vars(cls)
        for name in inspect.signature(vars(cls)["__init__"]).parameters
    }
    return {name: value for name, value in arguments.items() if name in known}


def accepted_arguments(function: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of ``arguments`` that ``function`` accepts."""
    known = inspect.signature(function).parameters
    return {name: value for name, value in arguments.items() if name in known}
