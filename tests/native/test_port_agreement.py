"""Port and native engine agree on random scenarios, in every decision and at every time.

``make nightly`` runs 300 scenarios per engine; ``AGREEMENT_CASES`` and ``AGREEMENT_SEED`` choose
other numbers. The table of features is printed with ``-s``.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, assume, given, seed, settings
from hypothesis import strategies as st

from simkv.conformance.port_comparison import compare_with_port
from simkv.core.errors import InputError
from simkv.native.native_engines import NATIVE_ENGINES
from simkv.scenario.custom.code_source import override_trust
from simkv.scenario.native_engine import resolve_sources
from simkv.scenario.scenario import Scenario
from tests.laws.random_scenarios import scenarios
from tests.native.test_native_engine import wheel_of

CASES = int(os.environ.get("AGREEMENT_CASES", "12"))
SEED = int(os.environ.get("AGREEMENT_SEED", "0"))


def with_source(scenario: Scenario, source: Path) -> Scenario:
    """Return the scenario with the code of a source as its engine."""
    tree: dict[str, Any] = scenario.model_dump(mode="json", exclude_defaults=True)
    tree["engine"]["source"] = str(source)
    resolve_sources(tree, source)
    return Scenario.model_validate(tree)


@pytest.mark.parametrize(("engine", "version"), [("vllm", "0.33.0"), ("sglang", "0.5.23")])
def test_port_agrees_with_engine(engine: str, version: str) -> None:
    source = wheel_of(engine, version)
    seen: Counter[str] = Counter()

    @seed(SEED)
    @settings(
        max_examples=CASES,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(data=st.data())
    def agree(data: st.DataObject) -> None:
        drawn = data.draw(scenarios(engine, version))
        assume(NATIVE_ENGINES[engine].refused(drawn.engine) is None)
        scenario = with_source(drawn, source)
        try:
            found = compare_with_port(scenario, source)
        except InputError as error:
            assume("not supported" in str(error))
            raise
        seen.update({name: 1 for name, count in found.features.items() if count})
        seen.update(scenarios=1, steps=found.steps)

    with override_trust(True):
        agree()
    assert seen["scenarios"] > CASES // 4
    print(f"\n{engine} {version}: {dict(sorted(seen.items()))}")
