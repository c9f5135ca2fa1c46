"""Tests of exported vLLM policies: vLLM's own scheduler with the exported class decides as the
simulation does.

The recordings were made by ``tests/custom/record_exports.py`` with an unmodified release of vLLM.
If the release is available, some cases are recorded again.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from simkv.api import run
from simkv.conformance.decision_replay import compare, replay_decisions
from simkv.conformance.decision_trace import DecisionTrace, read_traces
from simkv.conformance.policy_export import (
    TARGET_RELEASE,
    check_export,
    export_policy,
    first_mismatch,
    simulated_spec,
)
from simkv.core.errors import InputError
from simkv.schedulers.vllm.spec import VLLM
from tests.conformance.record.test_release_sources import WHEELS
from tests.custom.sample_scheduler import (
    FOUND,
    RECORDED,
    RULE,
    SCENARIO,
    write,
)

TRACES = list(read_traces(RECORDED / "decisions.jsonl.gz"))
OF_FOUND = list(read_traces(FOUND.parent / "decisions.jsonl.gz"))
BOTH = pytest.mark.parametrize("rule", [RULE, FOUND], ids=["written", "found"])
PLAIN = """from simkv.custom import CustomVllmConfig, CustomVllmScheduler


class Mine(CustomVllmScheduler):
    config: CustomVllmConfig
"""


@pytest.mark.parametrize("trace", TRACES, ids=lambda trace: trace.header["case"])
def test_simulated_policy_matches_recording(trace: DecisionTrace) -> None:
    assert first_mismatch(trace, simulated_spec(RULE, {})) is None


@pytest.mark.parametrize("trace", OF_FOUND, ids=lambda trace: trace.header["case"])
def test_simulated_search_result_matches_recording(trace: DecisionTrace) -> None:
    assert first_mismatch(trace, simulated_spec(FOUND, {})) is None


def test_recordings_detect_other_search_results(tmp_path: Path) -> None:
    """If a decision of the policy is removed or a number is changed, a decision in the recordings
    differs.
    """
    text = FOUND.read_text()
    seams = "waiting_order", "victim", "admit", "chunk"
    changed = [re.sub(rf" *{name} = .*\n", "", text) for name in seams]
    for other in (*changed, text.replace("5 *", "50 *"), text.replace("3 * age", "30 * age")):
        assert other != text
        (tmp_path / "other.yaml").write_text(other)
        ruled = simulated_spec(tmp_path / "other.yaml", {})
        assert any(first_mismatch(trace, ruled) for trace in OF_FOUND), other


def test_recordings_detect_other_policies() -> None:
    """If the policy is removed or a number is changed, a decision in the recordings differs."""
    assert any(compare(t, replay_decisions(VLLM, t.header, len(t.steps)))[1] for t in TRACES)
    for knobs in ({"alike": 1000}, {"few": 30}):
        assert any(first_mismatch(trace, simulated_spec(RULE, knobs)) for trace in TRACES), knobs


@BOTH
def test_export_matches_recorded_file(rule: Path) -> None:
    text = export_policy(rule, {}, f"{rule.stem}_for_vllm")
    assert text == (rule.parent / "exported.txt").read_text()
    names = {n.module for n in ast.walk(ast.parse(text)) if isinstance(n, ast.ImportFrom)}
    assert not any((name or "").startswith("simkv") for name in names)


def test_exports_knobs() -> None:
    assert "CONFIG = Knobs(alike=8, few=9)" in export_policy(RULE, {"few": 9}, "x")


@pytest.mark.skipif(
    not (WHEELS / f"vllm-{TARGET_RELEASE}").is_dir(),
    reason="the sources of this vLLM release are missing",
)
@BOTH
def test_released_scheduler_matches_simulation(rule: Path) -> None:
    found = dict(check_export(rule, {}, WHEELS / f"vllm-{TARGET_RELEASE}", 10))
    assert found == dict.fromkeys(found)


def test_empty_policy_changes_nothing(tmp_path: Path) -> None:
    knobs = {"num_gpu_blocks": 30, "max_model_len": 100, "async_scheduling": True}
    mine = write(tmp_path, PLAIN, engine={"name": "mine", "file": "mine.py", **knobs})
    ours = run(mine, trust=True).figures.drop("notes", errors="ignore")
    plain = run({**SCENARIO, "engine": {"name": "vllm", **knobs}}).figures
    for figure in ("verdict", "makespan_s", "preemptions", "e2e_ms.p99", "steps"):
        assert ours.loc[figure, "run"] == plain.loc[figure, "run"], figure


def test_exports_vllm_policies_only(tmp_path: Path) -> None:
    write(tmp_path)
    with pytest.raises(InputError, match="must be a CustomVllmScheduler"):
        export_policy(tmp_path / "mine.py", {}, "x")
    with pytest.raises(
        InputError, match="unknown setting of the policy; expected one of alike, few"
    ):
        export_policy(RULE, {"many": 1}, "x")
    with pytest.raises(
        InputError, match="this policy is written as expressions, which have no settings"
    ):
        export_policy(FOUND, {"few": 1}, "x")
    plain = tmp_path / "plain.yaml"
    plain.write_text(re.sub(r"variants:.*", "", FOUND.read_text(), flags=re.S))
    with pytest.raises(InputError, match=r"no variant with engine vllm sets engine\.rule"):
        export_policy(plain, {}, "x")


def test_custom_policy_excludes_policy_setting(tmp_path: Path) -> None:
    for knobs, what in (({"policy": "priority"}, "must be fcfs"), ({"variant": "0.33"}, "")):
        path = write(tmp_path, PLAIN, engine={"name": "mine", "file": "mine.py", **knobs})
        if what:
            with pytest.raises(InputError, match=what):
                run(path, trust=True)
        else:
            assert run(path, trust=True).figures.loc["finished", "run"] == 12
