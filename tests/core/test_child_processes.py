"""Tests that child processes ignore Ctrl-C, even in their first second, and that the parent does
not.
"""

from __future__ import annotations

import os
import signal
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

from simkv.core.child_processes import starting_children

pytestmark = pytest.mark.skipif(
    not hasattr(signal, "pthread_sigmask"), reason="this system has no signal masks"
)


def blocked() -> set[int]:
    """Return the signals blocked in this process."""
    return {int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, set())}


def test_children_block_interrupts() -> None:
    before = blocked()
    assert signal.SIGINT not in before
    with starting_children():
        pool = ProcessPoolExecutor(1, get_context("spawn"))
        child = pool.submit(blocked)
        safe = pool.submit(os.getenv, "PYTHONSAFEPATH")
    assert signal.SIGINT in child.result()
    assert safe.result() == "1"
    assert blocked() == before
    pool.shutdown()
