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
import yaml
from hypothesis import HealthCheck, Phase, assume, given, seed, settings
from hypothesis import strategies as st

from simkv.conformance.port_comparison import compare_with_port
from simkv.core.errors import InputError
from simkv.native.native_engines import NATIVE_ENGINES
from simkv.scenario.custom.code_source import override_trust
from simkv.scenario.native_engine import resolve_sources
from simkv.scenario.scenario import Scenario
from tests.conftest import ROOT
from tests.laws.random_scenarios import scenarios
from tests.native.test_native_engine import run_cli, wheel_of

CASES = int(os.environ.get("AGREEMENT_CASES", "12"))
SEED = int(os.environ.get("AGREEMENT_SEED", "0"))

#: Request 2 is preempted, and its client leaves while it waits.
ABORTED_AFTER_PREEMPTION = """
name: aborted-after-preemption
profile: l4-mistralrs-pr2034
engine:
  name: sglang
  variant: 0.5.23
  max_total_num_tokens: 44
  enable_priority_scheduling: true
  schedule_low_priority_values_first: true
  clip_max_new_tokens_estimation: 1
workload:
  requests:
  - {prompt_tokens: 22, output_tokens: 16, max_tokens: 22, prefix_group: b, prefix_tokens: 15}
  - {arrival: 1, prompt_tokens: 6, output_tokens: 15, priority: 2}
  - prompt_tokens: 30
    output_tokens: 8
    priority: 1
    prefix_group: b
    prefix_tokens: 8
    timeout: 3
  - {arrival: 0.3, prompt_tokens: 18, output_tokens: 12, prefix_group: b, prefix_tokens: 9}
"""


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


def test_request_aborted_after_preemption_is_not_lost() -> None:
    source = wheel_of("sglang", "0.5.23")
    scenario = Scenario.model_validate(yaml.safe_load(ABORTED_AFTER_PREEMPTION))
    with override_trust(True):
        seen = compare_with_port(with_source(scenario, source), source).features
    assert seen["preemptions"]
    assert seen["aborts"]


def test_steps_reserved_for_decoding_are_no_deadlock(tmp_path: Path) -> None:
    source = wheel_of("sglang", "0.5.23")
    scenario = ROOT / "scenarios" / "sglang-32549-decode-starved.yaml"
    words = ["--source", str(source), "--trust", "--out", str(tmp_path), "--no-plots"]
    code, text = run_cli("run", str(scenario), *words)
    assert code == 0, text
    assert "10 of 10 hold" in text
