"""Stubs for the imports of an engine's scheduler that do not affect its decisions.

The scheduler can therefore be imported quickly, without a GPU and without torch.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import sys
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any


class MissingImport(Exception):
    """Raised if a decision uses a name from a package that is not installed and has no stub."""


class Stub:
    """An object whose missing attributes are the results of ``_missing``, except special ones."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(self)._missing(self, name)

    def _missing(self, _: str) -> Any:
        return None


class AutoStub(Stub):
    """Stub of an attribute of ``module``; raises MissingImport if a decision depends on it."""

    def __init__(self, module: str, attribute: str, fix: str) -> None:
        self.__dict__["_stubbed"] = module, attribute, fix

    def _missing(self, name: str) -> Any:
        return self._more(f".{name}")

    def _more(self, text: str) -> AutoStub:
        module, attribute, fix = self._stubbed
        return AutoStub(module, attribute + text, fix)

    def __call__(self, *args: Any, **_: object) -> Any:
        if len(args) == 1 and callable(args[0]):
            return args[0]  # when used as a decorator
        return self._more("()")

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
        module, attribute, fix = self._stubbed
        raise MissingImport(f"the scheduler uses {attribute} of {module}; {fix}")

    __bool__ = __len__ = __iter__ = __int__ = __float__ = __index__ = _decides
    __lt__ = __le__ = __gt__ = __ge__ = __add__ = __radd__ = __sub__ = __rsub__ = _decides
    __mul__ = __rmul__ = __floordiv__ = __truediv__ = __mod__ = __neg__ = _decides
    __contains__ = __setitem__ = __getitem__ = _decides
    __eq__ = _decides
    __hash__ = object.__hash__


class AutoStubModule(Stub, types.ModuleType):
    """Stub of a module that is not installed, or that simkv does not know."""

    def __init__(self, name: str, fix: str) -> None:
        super().__init__(name)
        self._fix = fix

    def _missing(self, name: str) -> Any:
        return AutoStub(self.__name__, name, self._fix)


class ConfigStub(Stub):
    """A configuration object whose unset attributes are None."""

    def __init__(self, given: dict[str, Any] | None = None, **more: Any) -> None:
        self.__dict__.update(given or {})
        self.__dict__.update(more)


class OneRank(ConfigStub):
    """Settings of parallelism with one rank: sizes are 1, and ranks and indexes are 0."""

    def _missing(self, name: str) -> Any:
        if name.endswith(("rank", "index")):
            return 0
        return 1 if name.endswith("_size") else None


class StubType(Stub, type):
    """Metaclass of stub classes, which can be subclassed, subscripted and called."""

    def __new__(cls, name: str, bases: Any, space: Any, **_: object) -> Any:
        return super().__new__(cls, name, bases, space)

    def __init__(cls, name: str, bases: Any, space: Any, **_: object) -> None:
        super().__init__(name, bases, space)

    def _missing(cls, name: str) -> Any:
        return StubType(name, (ImportStub,), {})

    def __getitem__(cls, key: object) -> type:
        return cls

    def __iter__(cls) -> Iterator[Any]:
        return iter(())

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and callable(args[0]) and not kwargs:
            return args[0]  # when used as a decorator
        return super().__call__(*args, **kwargs)

    def __or__(cls, other: object) -> Any:
        return object

    __ror__ = __or__


class ImportStub(Stub, metaclass=StubType):
    """An object whose attributes are stubs and whose calls return None."""

    def __init__(self, *args: object, **kwargs: object) -> None: ...

    def _missing(self, _: str) -> Any:
        return ImportStub()

    def __call__(self, *args: Any, **_: object) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) else None

    def __bool__(self) -> bool:
        return False

    def __iter__(self) -> Iterator[Any]:
        return iter(())


class StubModule(Stub, types.ModuleType):
    def _missing(self, name: str) -> Any:
        setattr(self, name, StubType(name, (ImportStub,), {}))
        return self.__dict__[name]


class SourceFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Import hook for ``packages`` that loads modules from ``source`` or replaces them by stubs.

    ``real`` and ``stubbed`` list modules and packages; the longest name that contains a module
    applies. ``attributes`` maps the name of a stub module to its attributes. With ``strict``, a
    decision that depends on a module in neither list fails.
    """

    def __init__(
        self,
        source: Path,
        packages: Collection[str],
        real: Collection[str] = (),
        stubbed: Collection[str] = (),
        attributes: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
        *,
        strict: bool = False,
    ) -> None:
        self.source, self.packages, self.attributes = source, packages, attributes
        self.real, self.stubbed, self.strict = real, stubbed, strict

    def find_spec(self, name: str, _path: object, _target: object = None) -> Any:
        if name.split(".")[0] not in self.packages:
            return None
        if name.endswith("_C"):  # compiled, and replaced by Python code where it is missing
            raise ModuleNotFoundError(name)
        path = self.source.joinpath(*name.split("."))
        if _match(name, self.real) > _match(name, self.stubbed):  # some releases lack some modules
            if (init := path / "__init__.py").exists():
                places = [str(path)]
                return importlib.util.spec_from_file_location(
                    name, init, submodule_search_locations=places
                )
            if (file := path.with_suffix(".py")).exists():
                return importlib.util.spec_from_file_location(name, file)
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        name, modules = spec.name, (*self.real, *self.stubbed)
        contains = any(module.startswith(f"{name}.") for module in modules)
        if contains or _match(name, modules) or not self.strict:
            return StubModule(name)
        package = name.partition(".")[0]
        fix = "simkv does not load this module; add it to REAL_MODULES, or a stub of it"
        fix += f" to STUB_ATTRIBUTES, in simkv/native/{package}/{package}_stubs.py"
        return AutoStubModule(name, fix)

    def exec_module(self, module: types.ModuleType) -> None:
        """Set the attributes of a stub module that need a real implementation."""
        module.__path__ = []
        module.__dict__.update(self.attributes.get(module.__name__, {}))


def _match(name: str, modules: Collection[str]) -> int:
    """Return the length of the longest name in ``modules`` that contains a module, or 0."""
    return max((len(m) for m in modules if f"{name}.".startswith(f"{m}.")), default=0)


class AutoStubFinder(SourceFinder):
    """Import hook that replaces missing packages by stubs in the files of ``source``."""

    def find_spec(self, name: str, _path: object, _target: object = None) -> Any:
        frame: types.FrameType | None = sys._getframe(1)
        while frame and "importlib" in frame.f_code.co_filename:
            frame = frame.f_back
        if frame and frame.f_code.co_filename.startswith(str(self.source)):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        package = spec.name.partition(".")[0]
        fix = f"{package} is not installed; install it, or add a stub for it to simkv/native"
        return AutoStubModule(spec.name, fix)


@contextlib.contextmanager
def stub_imports(finder: SourceFinder) -> Iterator[None]:
    """Return a context that imports with ``finder`` and stubs, and restores modules at its end."""

    def theirs() -> dict[str, types.ModuleType]:
        return {k: m for k, m in sys.modules.items() if k.split(".")[0] in finder.packages}

    before = theirs()
    last = AutoStubFinder(finder.source, ())
    for name in before:
        del sys.modules[name]
    sys.meta_path.insert(0, finder)
    sys.meta_path.append(last)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        sys.meta_path.remove(last)
        stubs = {name for name, m in sys.modules.items() if isinstance(m, AutoStubModule)}
        for name in {*theirs(), *stubs}:
            del sys.modules[name]
        sys.modules.update(before)


def name_of(number: int) -> str:
    """Return the id that the engine uses for a request; ids sort like request numbers."""
    return f"{number:08}"


def numbering() -> Callable[..., int]:
    """Return a function that numbers its arguments from 1; equal arguments have equal numbers."""
    known: dict[Any, int] = {}
    return lambda *what: known.setdefault(what, len(known) + 1)


def accepted_fields(function: Callable[..., Any], /, **arguments: Any) -> dict[str, Any]:
    """Return the entries of ``arguments`` that a function or the constructor of a class accepts."""
    bases = [vars(kind) for kind in getattr(function, "__mro__", ())]
    functions = [base["__init__"] for base in bases if "__init__" in base] or [function]
    known = {name for each in functions for name in inspect.signature(each).parameters}
    return {name: value for name, value in arguments.items() if name in known}
