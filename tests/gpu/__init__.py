"""Tests of the real engine; all are skipped where torch is not installed (extra ``gpu``)."""

import pytest

torch = pytest.importorskip("torch", reason="the extra 'gpu' (torch) is not installed")
# The tiny model is faster with one thread, and CI has few cores.
torch.set_num_threads(1)
