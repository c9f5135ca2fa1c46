"""Where the code of a scheduler of one's own comes from, and whether it may be run.

It is run from an installed package (entry points ``simkv.schedulers``), or from a file where the
command itself says so: ``--trust``, or ``trust=True``. A scenario alone never suffices.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from simkv.core.errors import InputError, spelling_hint
from simkv.core.input_files import check_input, read_bytes

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

ENTRY_POINT_GROUP = "simkv.schedulers"
_TRUSTED: ContextVar[bool] = ContextVar("trusted", default=False)


@dataclass(frozen=True)
class CustomCode:
    """The code of a scheduler: its bytes, and the file that they are from."""

    path: str
    code: bytes

    @property
    def shown(self) -> str:
        """The file as a message names it: from here, if it is in here."""
        path, here = Path(self.path), Path.cwd()
        return str(path.relative_to(here) if path.is_relative_to(here) else path)

    @property
    def digest(self) -> str:
        """A hash of the bytes."""
        return hashlib.sha256(self.code).hexdigest()


def set_trust(yes: bool) -> None:
    """From now on in this process files that scenarios name are run, or not."""
    _TRUSTED.set(yes)


@contextmanager
def override_trust(yes: bool) -> Iterator[None]:
    """The same for a while; what was allowed before stays allowed."""
    token = _TRUSTED.set(yes or _TRUSTED.get())
    try:
        yield
    finally:
        _TRUSTED.reset(token)


def is_trusted() -> bool:
    """Whether such files are run now."""
    return _TRUSTED.get()


@lru_cache(maxsize=1)
def _points() -> tuple[EntryPoint, ...]:
    """Entry points of installed packages; read once, because every package's files are opened."""
    from importlib.metadata import entry_points

    return tuple(
        point for point in entry_points(group=ENTRY_POINT_GROUP) if not _in_current_folder(point)
    )


def _in_current_folder(point: EntryPoint) -> bool:
    """Whether the package lies in the current folder or in a relative folder of the module path.

    Nobody installed such a package: it may have been downloaded together with a scenario.
    """
    if point.dist is None:
        return False
    folder = Path(str(point.dist.locate_file("")))
    # Python makes the relative entries of PYTHONPATH absolute before this code runs.
    entries = [Path(entry) for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    relative = {entry.resolve() for entry in entries if not entry.is_absolute()}
    return not folder.is_absolute() or folder.resolve() in {Path.cwd(), *relative}


def list_installed_schedulers() -> list[str]:
    """Names of the schedulers that installed packages bring."""
    return sorted({point.name for point in _points()})


def load_from_package(name: str) -> tuple[Any, CustomCode]:
    """The scheduler that an installed package brings under this name. Raises InputError."""
    for point in _points():
        if point.name == name:
            try:
                found = point.load()
                path = Path(inspect.getfile(found))
            except Exception as error:
                raise InputError(f"{name}: {point.value} cannot be loaded: {error}") from error
            return found, CustomCode(str(path), path.read_bytes())
    raise InputError(
        "no installed package has a scheduler "
        f"{name!r}{spelling_hint(name, list_installed_schedulers())}"
    )


def load_from_file(path: Path, name: str) -> tuple[Any, CustomCode]:
    """The scheduler in a file. Raises InputError if it may not be run, or is none."""
    if not is_trusted():
        raise InputError(
            f"{path} is code that the scenario would run; read it, then say --trust (in Python "
            "trust=True)"
        )
    check_input(path)  # a pipe cannot be read again, by worker processes and debuggers
    code = read_bytes(path)
    source = CustomCode(str(path.resolve()), code)
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)  # the file may import modules beside it; they shadow no others
    return load_scheduler_class(source, name), source


@lru_cache(maxsize=64)
def load_scheduler_class(source: CustomCode, name: str) -> Any:
    """The scheduler class that the code defines: the only one, or that called ``name``.

    Raises InputError if it cannot be run or defines none.
    """
    module = ModuleType(f"simkv_own_{source.digest[:16]}")
    module.__file__ = source.path
    sys.modules[module.__name__] = module
    try:
        exec(compile(source.code, source.path, "exec"), module.__dict__)
    except InputError:
        raise
    except (Exception, SystemExit) as error:
        line = find_error_line(error, source.path) or getattr(error, "lineno", None) or 1
        what = f"{type(error).__name__}: {error}"
        raise InputError(f"{source.shown}:{line}: cannot be run: {what}") from error
    own = [
        one
        for one in vars(module).values()
        if isinstance(one, type) and one.__module__ == module.__name__ and hasattr(one, "schedule")
    ]
    chosen = own if len(own) == 1 else [one for one in own if one.__name__.lower() == name.lower()]
    if not chosen:
        what = f"{len(own)} schedulers, none of them called {name}" if own else "no scheduler"
        raise InputError(f"{source.shown}:1: defines {what}; expected a class with schedule()")
    return chosen[0]


def find_error_line(error: BaseException, path: str) -> int | None:
    """The line of a file in which an error was raised, or that called what raised it."""
    line, trace = None, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == path:
            line = trace.tb_lineno
        trace = trace.tb_next
    return line


def line_of_method(of: type[Any], path: str, name: str) -> int:
    """The line of a method; for ``schedule`` that of ``decide`` if the class has only that."""
    for one in (name, "decide", "schedule"):
        found = getattr(of, one, None)
        code = getattr(getattr(found, "fget", found), "__code__", None)
        if code is not None and code.co_filename == path:
            return int(code.co_firstlineno)
    return 1
