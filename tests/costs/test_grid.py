"""Attention by a grid of prefills and of decodes."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from simkv.costs.grid import AttentionGrid, GridCost
from simkv.costs.load import Load, pairs
from simkv.costs.profile import Fit, Profile, StepCost, Term
from simkv.costs.simulated import SimulatedExecutor, later

GRID = AttentionGrid(
    prefill_tokens=[1, 100, 1000],
    prefill_mean=[1, 50.5, 500.5],
    prefill_s=[[0.001, 0.001, 0.002], [0.001, 0.002, 0.011], [0.002, 0.011, 0.101]],
    decode_seqs=[1, 10],
    decode_context=[10, 1000, 2000],
    decode_s=[[0.001, 0.002, 0.004], [0.002, 0.012, 0.032]],
)


def profile(floor: list[Term] | None = None) -> Profile:
    terms = [Term(name="step", feature="steps", seconds=0.001)]
    return Profile(
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
        fit=Fit(points=0),
        source=[],
    )


def test_a_prompt_short_prompts_and_a_chunk_are_points_of_one_plane() -> None:
    cost = GridCost(GRID)
    assert cost(Load(1, 100, 0, 0, 0, pairs(100, 0), 1)) == pytest.approx(0.002)
    assert cost(Load(10, 1000, 0, 0, 0, 10 * pairs(100, 0), 10)) == pytest.approx(0.011)
    assert cost(Load(1, 100, 450, 0, 0, pairs(100, 450), 1)) == pytest.approx(0.011)
    # Beyond the grid the last line goes on.
    assert cost(Load(1, 1000, 450, 0, 0, pairs(1000, 450), 1)) == pytest.approx(0.191)


def test_decodes_and_prefills_of_a_mixed_step_are_added_up() -> None:
    cost = GridCost(GRID)
    assert cost(Load(0, 0, 0, 10, 10 * 1500, 0, 10)) == pytest.approx(0.022)
    both = Load(1, 100, 0, 10, 15000, pairs(100, 0), 11)
    assert cost(both) == pytest.approx(0.024)


@pytest.mark.parametrize("context", [1, 4, 500, 1995, 5000])
def test_steps_ahead_are_the_steps_one_by_one(context: int) -> None:
    floor = [Term(name="launch", feature="decode_seqs", seconds=0.0016)]
    for grid_profile in (profile(), profile(floor)):
        executor = SimulatedExecutor(grid_profile)
        load = Load(0, 0, 0, 3, 3 * context + 1, 0, 3)
        cost = StepCost(grid_profile)
        one_by_one = [cost(later(load, step)) for step in range(1, 40)]
        assert executor.foresee(load, 39) == pytest.approx(one_by_one, rel=1e-12)


def test_a_step_takes_as_long_as_the_host_needs_to_launch_it() -> None:
    floor = [Term(name="launch", feature="steps", when="prefill", seconds=0.05)]
    cost = StepCost(profile(floor))
    assert cost(Load(1, 100, 0, 0, 0, pairs(100, 0), 1)) == 0.05
    assert cost(Load(0, 0, 0, 1, 10, 0, 1)) == pytest.approx(0.002)


def test_what_is_refused() -> None:
    with pytest.raises(ValidationError, match="decode_s: should be 2 rows of 3"):
        AttentionGrid.model_validate({**GRID.model_dump(), "decode_s": [[1, 2, 3]]})
    with pytest.raises(ValidationError, match="prefill_mean: values must rise strictly"):
        AttentionGrid.model_validate({**GRID.model_dump(), "prefill_mean": [1, 1, 2]})
    with pytest.raises(ValidationError, match="does not depend on the context"):
        profile([Term(name="x", feature="decode_mean", seconds=1.0)])
