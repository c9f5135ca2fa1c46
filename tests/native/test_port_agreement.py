"""Tests that port and native engine agree on random scenarios, in every decision and at every time.

``make nightly`` compares 300 scenarios per engine; see ``tests.native.agreement``.
``AGREEMENT_CASES`` and ``AGREEMENT_SEED`` select other scenarios for this test.
"""

from __future__ import annotations

import os
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import Phase, given, seed, settings

from simkv.conformance.port_comparison import compare_with_port
from simkv.scenario.custom.code_source import override_trust
from simkv.scenario.scenario import Scenario
from tests.conftest import ROOT
from tests.native import agreement
from tests.native.agreement import (
    RELEASES,
    SeedResult,
    compare_seed,
    describe,
    read_results,
    with_source,
)
from tests.native.test_native_engine import (
    copy_of,
    plant_smaller_budget,
    run_cli,
    wheel_of,
)
from tests.sim.fleet.test_disaggregated_fleet import cases, split

CASES = int(os.environ.get("AGREEMENT_CASES", "12"))
SEED = int(os.environ.get("AGREEMENT_SEED", "0"))

#: Request 2 is preempted, and its client leaves while the request waits.
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


@pytest.mark.parametrize(("engine", "version"), RELEASES.items())
def test_port_agrees_with_engine(engine: str, version: str) -> None:
    found = compare_seed(engine, version, wheel_of(engine, version), SEED, CASES)
    print("\n".join(describe([vars(found)])))
    assert found.differences == []
    assert found.scenarios > CASES // 4


def test_planted_change_is_reported(tmp_path: Path) -> None:
    source = copy_of(wheel_of("vllm", "0.33.0"), tmp_path)
    plant_smaller_budget(source)
    found = compare_seed("vllm", "0.33.0", source, 0, 12)
    assert found.differences
    assert "first difference at step" in "\n".join(describe([vars(found)]))


def test_further_call_continues_after_the_last_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def compared(engine: str, version: str, _: Path, number: int, count: int) -> SeedResult:
        return SeedResult(engine, version, number, count, 7, Counter(aborts=2), Counter(tokens=7))

    (tmp_path / "vllm-0.33.0").mkdir()
    monkeypatch.setattr(agreement, "WHEELS", tmp_path)
    monkeypatch.setattr(agreement, "compare_seed", compared)
    out = tmp_path / "agreement.jsonl"
    for count, seeds in (30, [0]), (90, [0, 1, 2]), (60, [0, 1, 2]):
        monkeypatch.setattr(sys, "argv", ["", "--cases", str(count), "--out", str(out)])
        assert agreement.main() == 0
        assert [one["seed"] for one in read_results(out)] == seeds
    text = capsys.readouterr().out
    assert re.search(r"cases with aborts +6\n", text)
    assert "sglang: no wheel" in text


@pytest.mark.parametrize("version", ["0.19.1", "0.28.0", "0.33.0"])
def test_replicas_with_roles_agree(version: str) -> None:
    source = wheel_of("vllm", version)
    seen = Counter[str]()

    @seed(SEED)
    @settings(max_examples=2 * CASES, database=None, phases=[Phase.generate])
    @given(cases())
    def agree(case: dict[str, Any]) -> None:
        knobs = case["engine"] | {"variant": version, "num_gpu_blocks": 19, "max_num_seqs": 4}
        for request in case["requests"]:  # so that requests are preempted
            request["output_tokens"] = min(request["output_tokens"] + 20, 30)
        port = split(**case | {"engine": knobs})
        case |= {"engine": knobs | {"source": str(source), "source_state": "test"}}
        native = split(**case)
        if port.summary["stalled"]:  # a livelock may be detected at different steps
            assert native.summary["stalled"] == port.summary["stalled"]
            return
        for rows in ("request_rows", "step_rows"):
            assert getattr(port, rows)("") == getattr(native, rows)(""), rows
        seen["preemptions"] += port.summary["preemptions"]
        seen["aborts"] += port.summary["timed_out"]
        seen["finished"] += port.summary["finished"]

    with override_trust(True):
        agree()
    assert min(seen.values()) > 0, seen


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
