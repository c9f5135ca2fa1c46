"""Tests of the real engine; all are skipped where torch is not installed (extra ``gpu``)."""

import pytest

pytest.importorskip("torch", reason="the extra 'gpu' (torch) is not installed")
