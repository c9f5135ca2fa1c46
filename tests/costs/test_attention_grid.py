"""Tests of attention times from grids of prefills and decodes."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from simkv.costs.attention_grid import AttentionGrid, GridCost
from simkv.costs.cost_profile import (
    CostProfile,
    CostTerm,
    FitQuality,
    StepCost,
)
from simkv.costs.simulated_executor import SimulatedExecutor, advance_load
from simkv.costs.step_load import StepLoad, count_attention_pairs

GRID = AttentionGrid(
    prefill_tokens=[1, 100, 1000],
    prefill_mean=[1, 50.5, 500.5],
    prefill_s=[[0.001, 0.001, 0.002], [0.001, 0.002, 0.011], [0.002, 0.011, 0.101]],
    decode_seqs=[1, 10],
    decode_context=[10, 1000, 2000],
    decode_s=[[0.001, 0.002, 0.004], [0.002, 0.012, 0.032]],
)


def profile(floor: list[CostTerm] | None = None) -> CostProfile:
    terms = [CostTerm(name="step", feature="steps", seconds=0.001)]
    return CostProfile(
        name="a",
        engine="vllm",
        model="m",
        gpu="g",
        basis="assumed",
        terms=terms,
        grid=GRID,
        floor=floor,
        idle_pass_s=1e-4,
        range={},
        fit=FitQuality(points=0),
        source=[],
    )


def test_prompts_and_chunks_use_the_same_grid() -> None:
    cost = GridCost(GRID)
    assert cost(StepLoad(1, 100, 0, 0, 0, count_attention_pairs(100, 0), 1)) == pytest.approx(0.002)
    assert cost(
        StepLoad(10, 1000, 0, 0, 0, 10 * count_attention_pairs(100, 0), 10)
    ) == pytest.approx(0.011)
    assert cost(StepLoad(1, 100, 450, 0, 0, count_attention_pairs(100, 450), 1)) == pytest.approx(
        0.011
    )
    # Beyond the grid, the last segment is extrapolated.
    assert cost(StepLoad(1, 1000, 450, 0, 0, count_attention_pairs(1000, 450), 1)) == pytest.approx(
        0.191
    )


def test_mixed_step_costs_the_sum_of_prefills_and_decodes() -> None:
    cost = GridCost(GRID)
    assert cost(StepLoad(0, 0, 0, 10, 10 * 1500, 0, 10)) == pytest.approx(0.022)
    both = StepLoad(1, 100, 0, 10, 15000, count_attention_pairs(100, 0), 11)
    assert cost(both) == pytest.approx(0.024)


@pytest.mark.parametrize("context", [1, 4, 500, 1995, 5000])
def test_forecast_equals_single_steps(context: int) -> None:
    floor = [CostTerm(name="launch", feature="decode_seqs", seconds=0.0016)]
    for grid_profile in (profile(), profile(floor)):
        executor = SimulatedExecutor(grid_profile)
        load = StepLoad(0, 0, 0, 3, 3 * context + 1, 0, 3)
        cost = StepCost(grid_profile)
        one_by_one = [cost(advance_load(load, step)) for step in range(1, 40)]
        assert executor.forecast_steps(load, 39) == pytest.approx(one_by_one, rel=1e-12)


def test_step_takes_at_least_the_launch_time() -> None:
    floor = [CostTerm(name="launch", feature="steps", when="prefill", seconds=0.05)]
    cost = StepCost(profile(floor))
    assert cost(StepLoad(1, 100, 0, 0, 0, count_attention_pairs(100, 0), 1)) == 0.05
    assert cost(StepLoad(0, 0, 0, 1, 10, 0, 1)) == pytest.approx(0.002)


def test_rejects_invalid_grids() -> None:
    with pytest.raises(ValidationError, match="decode_s: must have 2 rows of 3"):
        AttentionGrid.model_validate({**GRID.model_dump(), "decode_s": [[1, 2, 3]]})
    with pytest.raises(ValidationError, match="prefill_mean: values must be strictly increasing"):
        AttentionGrid.model_validate({**GRID.model_dump(), "prefill_mean": [1, 1, 2]})
    with pytest.raises(ValidationError, match="must not contain terms that depend on the context"):
        profile([CostTerm(name="x", feature="decode_mean", seconds=1.0)])
