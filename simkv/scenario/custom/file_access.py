"""Detection of files that a custom scheduler reads while it makes decisions.

Such a file may contain future requests. An audit hook (``sys.addaudithook``, PEP 578) reports every
file that is opened. Imported code and files that are read during construction are ignored.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

#: Files read within the current call, by thread id.
_inside: dict[int, list[str]] = {}


@contextmanager
def watch_file_reads() -> Iterator[list[str]]:
    """Yield a list of the files that this thread opens for reading within the context.

    Files with code are left out.
    """
    _listen()
    thread = threading.get_ident()
    found: list[str] = []
    _inside[thread] = found
    try:
        yield found
    finally:
        _inside.pop(thread, None)


@cache
def _listen() -> None:
    sys.addaudithook(_heard)  # audit hooks cannot be removed from a process


def _heard(event: str, about: tuple[Any, ...]) -> None:
    if event != "open" or not _inside:
        return
    found = _inside.get(threading.get_ident())
    path, _, flags = about
    if found is None or isinstance(path, int) or flags & os.O_ACCMODE == os.O_WRONLY:
        return
    name = str(Path(os.fsdecode(path)).absolute())
    if not name.startswith(_code_lies_in()) and not name.endswith((".py", ".pyc", ".so")):
        found.append(os.fsdecode(path))


@cache
def _code_lies_in() -> tuple[str, ...]:
    return tuple({sys.prefix, sys.base_prefix, *sysconfig.get_paths().values()})
