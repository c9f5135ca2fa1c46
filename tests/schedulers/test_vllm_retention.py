"""Retention of cached blocks: what a session finds in the cache when it resumes, in closed form."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simkv.core.block_retention import RetentionPool, RetentionQueue
from simkv.core.errors import InputError
from simkv.metrics.run_metrics import request_rows
from simkv.metrics.scenario_runner import run_scenario
from simkv.scenario.scenario import Scenario
from simkv.schedulers.vllm.config import VllmConfig
from simkv.schedulers.vllm.spec import VLLM

BLOCK = 4
BLOCKS = 40


def listed(at: float, prompt: int, group: str | None = None, **fields: Any) -> dict[str, Any]:
    shared = {"prefix_group": group, "prefix_tokens": prompt - 1} if group else {}
    return {"arrival": at, "prompt_tokens": prompt, "output_tokens": 1, **shared, **fields}


def resumed(at: float, others: int, retention: float | None = None, **engine: Any) -> int:
    """Return the tokens that a prompt finds in the cache ``at`` seconds after the same prompt.

    In between, ``others`` prompts of 5 blocks each run one after the other, from 5 s on. The first
    and the last prompt have ten full blocks.
    """
    requests = [listed(0.0, 41, "a", retention=retention), listed(at, 41, "a")]
    requests[1:1] = [listed(5.0 + 2 * i, 20) for i in range(others)]
    scenario = Scenario.model_validate(
        {
            "name": "resumed",
            "workload": {"requests": requests},
            "engine": {
                "name": "vllm",
                "variant": "0.20.0",
                "block_size": BLOCK,
                "num_gpu_blocks": BLOCKS + 1,
                "max_model_len": 64,
                "async_scheduling": False,
                **engine,
            },
            "profile": "unit-step",
        }
    )
    found = run_scenario(scenario, Path(), intervals=False)
    return found.record.requests[others + 1].chunks[0].context


def test_lru_evicts_the_tail_of_the_idle_prefix() -> None:
    # 11 of 40 blocks were used (10 full ones); the last is the first to be allocated again after
    # the 29 that were never used.
    assert resumed(90.0, others=5) == 10 * BLOCK
    assert resumed(90.0, others=6) == 10 * BLOCK
    assert resumed(90.0, others=7) == (10 - 5) * BLOCK
    assert resumed(90.0, others=8) == 0


def test_retained_blocks_stay_until_their_time_is_over() -> None:
    # Ten other prompts need 50 blocks: they evict each other, but not the ten retained blocks.
    assert resumed(90.0, others=10) == 0
    assert resumed(90.0, 10, retention=100.0, request_retention=True) == 10 * BLOCK
    assert resumed(90.0, 10, retention=25.0, request_retention=True) == 10 * BLOCK
    assert resumed(90.0, 10, retention=100.0) == 0


@pytest.mark.parametrize(("late", "kept"), [(1, 10 - 5), (2, 0), (3, 0)])
def test_blocks_are_evicted_first_when_their_time_is_over(late: int, kept: int) -> None:
    # The first prompt ends at 1 s. Other prompts run at 5, 7, 9 s and so on, with 29 blocks that
    # were never used: the first after the retention takes five of the ten blocks all the same.
    others = 4
    end = 5.0 + 2 * (others - late) - 0.5
    found = resumed(90.0, others, retention=end - 1.0, request_retention=True)
    assert found == kept * BLOCK


def test_pinned_blocks_stay_until_no_other_block_is_left() -> None:
    assert resumed(90.0, others=20, pin_priority=-1) == 0
    assert resumed(90.0, others=20, pin_priority=0) == 0  # all are pinned: the oldest is evicted
    found = []
    for prompt in (20, 48):  # 48 tokens of 12 others need more than the 30 blocks left
        requests = [listed(0.0, 41, "a", priority=-5), listed(90.0, 41, "a")]
        requests[1:1] = [listed(5.0, prompt) for _ in range(6 if prompt == 20 else 3)]
        scenario = Scenario.model_validate(
            {
                "name": "pinned",
                "workload": {"requests": requests},
                "engine": {
                    "name": "vllm",
                    "block_size": BLOCK,
                    "num_gpu_blocks": BLOCKS + 1,
                    "max_model_len": 64,
                    "async_scheduling": False,
                    "pin_priority": -5,
                },
                "profile": "unit-step",
            }
        )
        record = run_scenario(scenario, Path(), intervals=False).record
        found.append(record.requests[len(requests) - 1].chunks[0].context)
    # Six prompts need 30 blocks at once. Three prompts of 12 blocks need 36: six too many.
    assert found == [10 * BLOCK, (10 - 6) * BLOCK]


def sessions(leaping: bool, **engine: Any) -> list[dict[str, Any]]:
    load = {
        "retention": 40.0,
        "num_sessions": 15,
        "request_rate": 0.1,
        "turns": 4,
        "prompt_tokens": 20,
        "output_tokens": 12,
        "think_time": {"distribution": "exponential", "mean": 30.0},
    }
    scenario = Scenario.model_validate(
        {
            "name": "sessions",
            "workload": {"sessions": load},
            "engine": {
                "name": "vllm",
                "block_size": BLOCK,
                "num_gpu_blocks": 90,
                "max_model_len": 140,
                **engine,
            },
            "profile": "unit-step",
        }
    )
    record = run_scenario(scenario, Path(), leaping=leaping, intervals=False).record
    cached = [life.chunks[0].context for life in record.requests.values()]
    rows = request_rows("run", record)
    return [row | {"cached": tokens} for row, tokens in zip(rows, cached, strict=True)]


@pytest.mark.parametrize("engine", [{"request_retention": True}, {"pin_priority": 0}])
@pytest.mark.parametrize("asynchronous", [True, False])
def test_leaping_does_not_change_retention(engine: dict[str, Any], asynchronous: bool) -> None:
    rows = sessions(True, async_scheduling=asynchronous, **engine)
    assert rows == sessions(False, async_scheduling=asynchronous, **engine)
    if "request_retention" in engine:
        assert rows != sessions(True, async_scheduling=asynchronous)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 6), st.integers(0, 3)), max_size=40))
def test_pool_stays_consistent_and_its_order_is_that_of_allocation(
    actions: list[tuple[int, int, int]],
) -> None:
    pool = RetentionPool(24)
    now, key, owner = 0.0, 0, 0
    for kind, size, hold in actions:
        now += size
        if kind <= 2 and size <= pool.free:
            order = pool.free_order()
            owner += 1
            assert tuple(pool.take(owner, size)) == order[:size]
            for block in list(pool.tables[owner])[: size - hold]:
                key += 1
                pool.register(block, key)
        elif kind == 3 and pool.tables:
            pool.hold = (0.0, 2.0, 9.0, float("inf"))[hold]
            pool.release(min(pool.tables), keyless_first=size > 3)
            pool.hold = 0.0
        elif kind == 4:
            pool.queue.set_time(now)
        elif kind == 5 and key and pool.find([key])[0]:
            owner += 1
            pool.share(owner, pool.find([key]))
        pool.check()
        assert len(pool.free_order()) == pool.free


def test_retention_starts_at_the_next_time_after_the_clock_stops() -> None:
    queue = RetentionQueue(4)
    blocks = queue.take(4)
    queue.set_time(1.0)
    queue.stop_clock()
    queue.retain(blocks[:1], 5.0)
    assert queue.has_deadline
    queue.set_time(10.0)
    queue.append(np.array([blocks[1]], dtype=np.intc))
    queue.set_time(14.9)
    assert list(queue) == [2, 1]
    queue.set_time(15.0)
    assert list(queue) == [1, 2]
    assert not queue.has_deadline


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"enable_prefix_caching": False}, "request_retention: requires enable_prefix_caching"),
        ({"num_cpu_blocks": 9}, "request_retention: not supported with num_cpu_blocks"),
        ({"kv_cache_groups": (0, 64)}, "request_retention: not supported with kv_cache_groups"),
    ],
)
def test_refuses_what_it_does_not_model(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        VllmConfig(request_retention=True, **fields)


def test_a_device_rejects_retention() -> None:
    """Recorded decisions would depend on times that a recording does not contain."""
    with pytest.raises(InputError, match="request_retention: not available on a device"):
        VLLM.build_with_tables(VllmConfig(enable_prefix_caching=True, request_retention=True))
