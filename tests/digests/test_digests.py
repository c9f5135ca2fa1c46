"""Tests that the files written by simkv equal the recorded digests, byte for byte, and that every
packaged incident has the expected result.
"""

from __future__ import annotations

import json

import pytest

from tests.digests.write_digests import FILE, NAMES, digests

KNOWN = json.loads(FILE.read_text())


@pytest.mark.parametrize("name", NAMES)
def test_results_are_the_same_bytes(name: str) -> None:
    assert digests(name) == KNOWN[name]
