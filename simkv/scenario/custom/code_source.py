"""Load the code of custom schedulers, if the user trusts it.

Code comes from an installed package (entry points ``simkv.schedulers``) or from a file. Code from a
file requires ``--trust`` or ``trust=True``.
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
    """Code of a custom scheduler: its bytes, and the path of the file."""

    path: str
    code: bytes

    @property
    def shown(self) -> str:
        """Path for messages, relative to the current directory if possible."""
        path, here = Path(self.path), Path.cwd()
        return str(path.relative_to(here) if path.is_relative_to(here) else path)

    @property
    def digest(self) -> str:
        """SHA-256 of the bytes, in hexadecimal."""
        return hashlib.sha256(self.code).hexdigest()


def set_trust(yes: bool) -> None:
    """Set whether this process may execute files that scenarios name."""
    _TRUSTED.set(yes)


@contextmanager
def override_trust(yes: bool) -> Iterator[None]:
    """Allow the execution of files within this context if ``yes``."""
    token = _TRUSTED.set(yes or _TRUSTED.get())
    try:
        yield
    finally:
        _TRUSTED.reset(token)


def is_trusted() -> bool:
    """Return whether this process may execute files that scenarios name."""
    return _TRUSTED.get()


@lru_cache(maxsize=1)
def _points() -> tuple[EntryPoint, ...]:
    """Return the scheduler entry points of packages; cached, because reading them is slow."""
    from importlib.metadata import entry_points

    return tuple(
        point for point in entry_points(group=ENTRY_POINT_GROUP) if not _in_current_folder(point)
    )


def _in_current_folder(point: EntryPoint) -> bool:
    """Return whether the package is in the current directory or a relative PYTHONPATH entry.

    Such a package does not count as installed, because it may belong to a downloaded scenario.
    """
    if point.dist is None:
        return False
    folder = Path(str(point.dist.locate_file("")))
    # Python makes the relative entries of PYTHONPATH absolute before this code runs.
    entries = [Path(entry) for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    relative = {entry.resolve() for entry in entries if not entry.is_absolute()}
    return not folder.is_absolute() or folder.resolve() in {Path.cwd(), *relative}


def list_installed_schedulers() -> list[str]:
    """Return the names of the schedulers that installed packages provide."""
    return sorted({point.name for point in _points()})


def load_from_package(name: str) -> tuple[Any, CustomCode]:
    """Return the scheduler class ``name`` of an installed package, and the code of its file.

    Raises InputError if no package provides the class, or if it cannot be loaded.
    """
    for point in _points():
        if point.name == name:
            try:
                found = point.load()
                path = Path(inspect.getfile(found))
            except Exception as error:
                raise InputError(f"{name}: {point.value} cannot be loaded: {error}") from error
            return found, CustomCode(str(path), path.read_bytes())
    raise InputError(
        "no installed package provides a scheduler "
        f"{name!r}{spelling_hint(name, list_installed_schedulers())}"
    )


def load_from_file(path: Path, name: str) -> tuple[Any, CustomCode]:
    """Return the scheduler class in a file, and its code.

    Raises InputError if files are not trusted, or if the file does not define the class.
    """
    if not is_trusted():
        raise InputError(
            f"{path}: the scenario would run this code; review it, then pass --trust (in Python: "
            "trust=True)"
        )
    # worker processes and debuggers read the file again, which is impossible for a pipe
    check_input(path)
    code = read_bytes(path)
    source = CustomCode(str(path.resolve()), code)
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        # the file may import modules from its directory, which is last on the path so that they
        # shadow no other modules
        sys.path.append(folder)
    return load_scheduler_class(source, name), source


@lru_cache(maxsize=64)
def load_scheduler_class(source: CustomCode, name: str) -> Any:
    """Return the scheduler class in the code: the only one, or the one called ``name``.

    Raises InputError if the code cannot be executed or does not define the class.
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
        raise InputError(f"{source.shown}:{line}: cannot run: {what}") from error
    own = [
        one
        for one in vars(module).values()
        if isinstance(one, type) and one.__module__ == module.__name__ and hasattr(one, "schedule")
    ]
    chosen = own if len(own) == 1 else [one for one in own if one.__name__.lower() == name.lower()]
    if not chosen:
        what = f"{len(own)} schedulers, none of them named {name}" if own else "no scheduler"
        raise InputError(f"{source.shown}:1: defines {what}; expected a class with schedule()")
    return chosen[0]


def find_error_line(error: BaseException, path: str) -> int | None:
    """Return the line of the file ``path`` at which an error occurred, or None.

    The line is the innermost one of this file in the traceback.
    """
    line, trace = None, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == path:
            line = trace.tb_lineno
        trace = trace.tb_next
    return line


def line_of_method(of: type[Any], path: str, name: str) -> int:
    """Return the first line of a method in the file ``path``.

    If the file does not define the method, return the line of ``decide`` or ``schedule``, or 1.
    """
    for one in (name, "decide", "schedule"):
        found = getattr(of, one, None)
        code = getattr(getattr(found, "fget", found), "__code__", None)
        if code is not None and code.co_filename == path:
            return int(code.co_firstlineno)
    return 1
