"""Tests of the option ``--seed`` of ``simkv record`` and ``simkv follow``."""

from __future__ import annotations

import pytest

from simkv.cli.record import _names
from simkv.conformance.record.engine_drivers import ENGINE_DRIVERS


@pytest.mark.parametrize(("engine", "version"), [("vllm", "0.33.0"), ("sglang", "0.5.23")])
def test_seeds_have_different_cases(engine: str, version: str) -> None:
    names = [_names(ENGINE_DRIVERS[engine], version, 40, seed) for seed in (0, 1, 7)]
    assert len({name for some in names for name in some}) == sum(map(len, names))
    assert max(map(len, names)) <= min(map(len, names)) + 40
