"""Start Python processes that import nothing from the current directory and ignore Ctrl-C.

A child process of ``multiprocessing`` starts as ``python -c``, which puts the current directory
first on its module path. The child would therefore execute a file such as ``pickle.py`` in a
downloaded directory. A terminal also sends Ctrl-C to child processes, and a child that is still
starting would print a traceback.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker

_VARIABLE = "PYTHONSAFEPATH"


@contextmanager
def starting_children() -> Iterator[None]:
    """Context manager in which child processes are started safely.

    The children do not search the current directory for modules, and SIGINT is blocked.
    """
    before = os.environ.get(_VARIABLE)
    os.environ[_VARIABLE] = "1"
    masks = hasattr(signal, "pthread_sigmask")  # not on Windows
    if masks:
        resource_tracker.ensure_running()  # the start of a child unblocks SIGINT
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT}) if masks else None
    try:
        yield
    finally:
        if before is None:
            del os.environ[_VARIABLE]
        else:
            os.environ[_VARIABLE] = before
        if mask is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
