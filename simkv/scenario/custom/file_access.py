"""What a scheduler of one's own reads while it decides: a file may hold what will come.

The interpreter tells of every file that is opened (``sys.addaudithook``, PEP 578). Code that is
imported is no news of requests, and what a scheduler reads when it is built is its own affair.
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

#: The thread that is within a call, and what it has read there.
_inside: dict[int, list[str]] = {}


@contextmanager
def watch_file_reads() -> Iterator[list[str]]:
    """The files that this thread opens for reading in the meantime, but for code."""
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
    sys.addaudithook(_heard)  # for as long as the process lives: there is no way back


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
