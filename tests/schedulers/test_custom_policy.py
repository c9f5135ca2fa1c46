"""Tests of engines in which a custom policy makes some decisions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from simkv.core.errors import InputError
from simkv.core.request import Prompt
from simkv.metrics.run_result import RunResult
from simkv.metrics.scenario_runner import run_scenario
from simkv.scenario.packaged_scenarios import find_scenario
from simkv.scenario.scenario_loader import load
from simkv.schedulers.engine_registry import build_scheduler
from simkv.schedulers.mistralrs.config import MistralrsConfig
from simkv.schedulers.vllm.config import VllmConfig

FORTY = find_scenario(Path("mistralrs-forty"))
#: The change of pull request 2034, as a custom policy of the variant from before this change.
LIKE_2034 = "running_order = -age; alike = 0; turn = -age"


def forty(rule: str | None, variant: str = "before-assumed") -> RunResult:
    scenario = load(FORTY, [] if rule is None else [f'engine.rule="{rule}"'])[variant]
    return run_scenario(scenario, FORTY.parent, intervals=False)


def test_policy_reproduces_fix_of_pr_2034() -> None:
    ruled, fixed = forty(LIKE_2034), forty(None, "after-assumed")
    assert ruled.request_rows("") == fixed.request_rows("")
    assert forty(None).summary["starved"] == 24


def test_policy_with_default_expressions_changes_nothing() -> None:
    plain = forty(None)
    assert forty("alike = tokens; turn = tokens; keep = 0").summary == plain.summary
    assert forty("admit = 1").summary == plain.summary


def step(config: Any, prompts: list[Prompt]) -> list[int]:
    scheduler = build_scheduler(config)
    for prompt in prompts:
        scheduler.add(prompt)
    return [i for i, _ in scheduler.schedule().scheduled]


@pytest.mark.parametrize("of", [VllmConfig, MistralrsConfig])
def test_waiting_order_sorts_queue(of: Any) -> None:
    """Request 1 arrived later and is shorter than request 0; only one of them can run."""
    prompts = [Prompt(0, 60, 9), Prompt(1, 20, 9, arrival=1.0), Prompt(2, 20, 9, arrival=2.0)]
    for rule, first in (
        (None, 0),
        ("waiting_order = prompt_tokens", 1),
        ("waiting_order = prompt_tokens - 50 * age", 0),
        ("waiting_order = age", 2),
    ):
        config = of(max_num_seqs=1, rule=rule)
        assert step(config, prompts) == [first], rule


def test_admit_blocks_admission_at_zero_or_below() -> None:
    prompts = [Prompt(i, 20, 9) for i in range(4)]
    for config in (VllmConfig(), MistralrsConfig(variant="bucketed")):
        assert step(config, prompts) == [0, 1, 2, 3]
        held = replace(config, rule="admit = 2 - running")
        assert step(held, prompts) == [0, 1]
        assert step(replace(config, rule="admit = 0"), prompts) == [0]


def test_vllm_preempts_request_with_largest_victim_value() -> None:
    config = VllmConfig(num_gpu_blocks=9, max_model_len=128, enable_prefix_caching=False)
    for rule, lost in ((None, [2]), ("victim = prompt_tokens", [0]), ("victim = -age", [2])):
        scheduler = build_scheduler(replace(config, rule=rule, async_scheduling=False))
        for i, tokens in enumerate((48, 33, 32)):
            scheduler.add(Prompt(i, tokens, 50, arrival=float(i)))
        scheduler.complete(scheduler.schedule(), ())
        assert scheduler.schedule().preempted == lost, rule


def test_vllm_limits_chunks_by_policy() -> None:
    scheduler = build_scheduler(VllmConfig(rule="chunk = 30 if waiting > 1 else 0"))
    for i in range(2):
        scheduler.add(Prompt(i, 100, 9))
    assert scheduler.schedule().scheduled == [(0, 30), (1, 30)]


@pytest.mark.parametrize(
    ("config", "knobs", "told"),
    [
        (MistralrsConfig, {"variant": "seed"}, "does not support custom policies"),
        (MistralrsConfig, {"variant": "pr2034july"}, "does not support custom policies"),
        (VllmConfig, {"variant": "0.33.0-skip-blocked"}, "does not support custom policies"),
        (VllmConfig, {"policy": "priority"}, "a custom policy cannot be combined with policy"),
    ],
)
def test_rejects_policy_for_variants_without_hooks(
    config: Any, knobs: dict[str, Any], told: str
) -> None:
    config(**knobs)
    with pytest.raises(ValueError, match=told):
        config(**knobs, rule="admit = 1")


def test_error_in_policy_names_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(
        "name: a\nworkload: {burst: {num_prompts: 2, prompt_tokens: 9, output_tokens: 3}}\n"
        "engine: {name: vllm, rule: 'victim = output_tokens'}\nprofile: unit-step\n"
    )
    with pytest.raises(
        InputError, match=r"a.yaml:3: engine.*rule: victim: unknown name 'output_tokens'"
    ):
        load(path)
