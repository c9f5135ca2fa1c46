"""Tests of variants that no release contains: they change the stated rules of the release, and no
others.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simkv.core.request import Prompt, Segment
from simkv.metrics.run_metrics import request_rows, step_rows
from simkv.scenario.scenario import Scenario
from simkv.schedulers.sglang.config import SglangConfig
from simkv.schedulers.sglang.scheduler import SglangScheduler
from simkv.schedulers.vllm.config import VllmConfig
from simkv.schedulers.vllm.scheduler import VllmScheduler
from tests.laws.random_scenarios import run, scenarios

SKIP = "0.33.0-skip-blocked"
AGING = "0.5.23-lpm-aging"


def with_engine(scenario: Scenario, **knobs: Any) -> Scenario:
    """Return the scenario with some engine settings changed."""
    return scenario.model_copy(update={"engine": replace(scenario.engine, **knobs)})


def rows(scenario: Scenario) -> Any:
    record = run(scenario).record
    return request_rows("", record), step_rows("", record)


# ------------------------------------------------------------------ vLLM: skip blocked requests


def vllm(variant: str, **knobs: Any) -> VllmScheduler:
    config = {"block_size": 4, "num_gpu_blocks": 11, "max_model_len": 40, "max_num_seqs": 8}
    return VllmScheduler(
        VllmConfig(
            variant=variant,  # type: ignore[arg-type]
            **{**config, "async_scheduling": False, "enable_prefix_caching": False, **knobs},
        )
    )


def admitted(scheduler: VllmScheduler) -> list[int]:
    before = set(scheduler.running_ids())
    scheduler.complete(scheduler.schedule(), ())
    return [i for i in scheduler.running_ids() if i not in before]


@pytest.mark.parametrize(("variant", "expected"), [("0.33.0", []), (SKIP, [2, 4])])
def test_requests_behind_blocked_head_are_tried(variant: str, expected: list[int]) -> None:
    scheduler = vllm(variant)
    scheduler.add(Prompt(0, 20, 9))  # 5 of the 10 blocks
    assert admitted(scheduler) == [0]
    for prompt in (Prompt(1, 36, 4), Prompt(2, 4, 9), Prompt(3, 30, 9), Prompt(4, 4, 9)):
        scheduler.add(prompt)
    assert admitted(scheduler) == expected
    assert scheduler.waiting_ids() == [i for i in (1, 2, 3, 4) if i not in expected]


def test_skipped_request_is_tried_first_in_next_step() -> None:
    scheduler = vllm(SKIP)
    scheduler.add(Prompt(0, 20, 9))
    scheduler.add(Prompt(1, 36, 4))  # 9 of the 10 blocks
    scheduler.add(Prompt(2, 4, 9))
    assert admitted(scheduler) == [0, 2]
    scheduler.add(Prompt(3, 8, 9))  # 2 blocks
    scheduler.abort(0)
    scheduler.abort(2)
    assert admitted(scheduler) == [1]
    assert scheduler.waiting_ids() == [3]


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_urgent_requests_are_admitted_first(policy: str) -> None:
    scheduler = vllm(SKIP, policy=policy)
    scheduler.add(Prompt(0, 20, 9))
    assert admitted(scheduler) == [0]
    scheduler.add(Prompt(1, 4, 9, priority=5))
    scheduler.add(Prompt(2, 36, 4, priority=1))
    scheduler.add(Prompt(3, 4, 9, priority=3))
    assert admitted(scheduler) == ([1, 3] if policy == "fcfs" else [3, 1])
    assert scheduler.waiting_ids() == [2]


@given(data=st.data())
def test_skipping_changes_nothing_without_blocked_requests(data: st.DataObject) -> None:
    scenario = data.draw(scenarios("vllm", "0.33.0"))
    knobs = {"num_gpu_blocks": 1000, "watermark": 0.0, "rule": None, "kv_cache_groups": (0,)}
    knobs |= {"num_speculative_tokens": 0, "num_cpu_blocks": 0, "eviction_policy": "lru"}
    knobs |= {"secondary_tiers": (), "prefix_cache_retention_interval": None}
    if scenario.engine.policy == "vtc":  # not modelled for this variant
        knobs["policy"] = "fcfs"
    same = with_engine(scenario, **knobs), with_engine(scenario, variant=SKIP, **knobs)
    assert rows(same[0]) == rows(same[1])


def test_start_up_check_can_be_disabled() -> None:
    with pytest.raises(ValueError, match=r"less than max_model_len \(41\)"):
        vllm("0.33.0", max_model_len=41)
    scheduler = vllm("0.33.0", max_model_len=50, startup_check=False)
    scheduler.add(Prompt(0, 41, 2))
    scheduler.add(Prompt(1, 4, 2))
    assert admitted(scheduler) == []
    assert scheduler.waiting_ids() == [0, 1]


# ------------------------------------------------------------------ SGLang: lpm with aging


def sglang(aging: int, **knobs: Any) -> SglangScheduler:
    return SglangScheduler(
        SglangConfig(
            variant=AGING,
            lpm_aging_tokens_per_pass=aging,
            schedule_policy="lpm",
            max_total_num_tokens=2000,
            max_running_requests=1,
            disable_overlap_schedule=True,
            **knobs,
        )
    )


def prefills(scheduler: SglangScheduler, cached: int) -> list[int]:
    """Return the order in which request 1, which is not cached, and cached requests are served.

    One cached request arrives in each pass.
    """

    def add(i: int) -> None:
        cached_prompt = (Segment("common", 0, 100), Segment(f"u{i}", 0, 20))
        scheduler.add(Prompt(i, 120, 1, segments=() if i == 1 else cached_prompt))

    order: list[int] = []
    add(0)
    for newcomer in range(2, cached + 2):
        batch = scheduler.schedule()
        served = [i for i, _ in batch.scheduled]
        scheduler.complete(batch, served)
        order += served
        if newcomer == 2:
            add(1)
        add(newcomer)
    return order


@pytest.mark.parametrize(("aging", "passes"), [(0, None), (20, 5), (60, 2), (200, 1)])
def test_uncached_request_waits_until_its_age_exceeds_cached_tokens(
    aging: int, passes: int | None
) -> None:
    """A new cached request has 100 cached tokens and an age of one pass, so request 1 must wait 100
    / N more passes.
    """
    order = prefills(sglang(aging), cached=12)
    assert order[0] == 0
    if passes is None:
        assert order[1:] == list(range(2, 13))
    else:
        assert order.index(1) == passes + 1


def test_rejects_aging_option_of_other_variant() -> None:
    with pytest.raises(ValueError, match="use variant '0\\.5\\.23-lpm-aging'"):
        SglangConfig(lpm_aging_tokens_per_pass=1)


@given(data=st.data())
def test_zero_aging_equals_release(data: st.DataObject) -> None:
    scenario = data.draw(scenarios("sglang", "0.5.23"))
    assert rows(scenario) == rows(with_engine(scenario, variant=AGING))
