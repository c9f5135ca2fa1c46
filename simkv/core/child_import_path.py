"""Start Python processes that import no modules from the current directory.

A child process of ``multiprocessing`` starts as ``python -c``, which puts the current directory
first on its module path. It would therefore run a file ``pickle.py`` in a downloaded directory.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

_VARIABLE = "PYTHONSAFEPATH"


@contextmanager
def safe_module_path() -> Iterator[None]:
    """While the block runs, start Python processes without the current directory on their module
    path.
    """
    before = os.environ.get(_VARIABLE)
    os.environ[_VARIABLE] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_VARIABLE]
        else:
            os.environ[_VARIABLE] = before
