"""Tests of step durations from a profile, and of the recorded time outside the range of the
profile.
"""

from __future__ import annotations

from typing import Any

import pytest

from simkv.core.scheduler_protocol import Batch
from simkv.costs.cost_profile import CostProfile
from simkv.costs.simulated_executor import SimulatedExecutor, advance_load
from simkv.costs.step_load import StepLoad, compute_step_load

PLAIN: dict[str, Any] = {
    "name": "test",
    "engine": "any",
    "model": "none",
    "gpu": "none",
    "basis": "assumed",
    "terms": [
        {"name": "step", "feature": "steps", "seconds": 1.0},
        {"name": "prompt", "feature": "prefill_tokens", "seconds": 0.1},
        {"name": "context", "feature": "decode_context", "seconds": 0.01},
    ],
    "idle_pass_s": 0.5,
    "range": {"prefill_tokens": [1, 100], "decode_seqs": [2, 4]},
    "fit": {"points": 0},
    "source": [],
}


def executor(**changes: Any) -> SimulatedExecutor:
    return SimulatedExecutor(CostProfile.model_validate({**PLAIN, **changes}))


def prefill(tokens: int) -> StepLoad:
    return StepLoad(1, tokens, 0, 0, 0)


def decode(seqs: int, context: int) -> StepLoad:
    return StepLoad(0, 0, 0, seqs, context)


# Load of a batch


def test_load_of_a_prefill_batch() -> None:
    batch = Batch(scheduled=[(0, 10), (1, 1)], context=[0, 7], kind="prefill")
    # Without decodes, a single token also counts as a prefill.
    assert compute_step_load(batch)[:5] == (2, 11, 7, 0, 0)


def test_load_of_a_decode_batch() -> None:
    batch = Batch(scheduled=[(0, 1), (1, 1)], context=[5, 7], kind="decode")
    assert compute_step_load(batch)[:5] == (0, 0, 0, 2, 12)


def test_load_includes_the_decode_group() -> None:
    batch = Batch(scheduled=[(0, 1)], context=[5], kind="decode", decodes=3, decode_context=40)
    assert compute_step_load(batch)[:5] == (0, 0, 0, 4, 45)
    batch = Batch(scheduled=[(0, 9)], context=[5], kind="mixed", decodes=3, decode_context=40)
    assert compute_step_load(batch)[:5] == (1, 9, 5, 3, 40)


def test_single_token_with_context_counts_as_decode_in_mixed_batch() -> None:
    batch = Batch(scheduled=[(0, 10), (1, 1), (2, 1)], context=[4, 7, 0], kind="mixed")
    assert compute_step_load(batch)[:5] == (2, 11, 4, 1, 7)


def test_load_of_an_idle_batch_is_zero() -> None:
    assert compute_step_load(Batch())[:5] == (0, 0, 0, 0, 0)


# Durations


def test_step_time_is_the_profile_time() -> None:
    found = executor()
    assert found.run(prefill(20)) == pytest.approx(3.0)
    assert found.run(decode(2, 50)) == pytest.approx(1.5)
    assert found.busy == pytest.approx(4.5)
    assert found.idle() == 0.5
    assert found.outside == {}


def test_group_of_ranks_is_the_same_in_later_steps() -> None:
    load = StepLoad(0, 0, 0, 3, 30, emits=3, group_tokens=7, group_most=4, group_ranks=2)
    assert advance_load(load, 2) == load._replace(decode_context=36)


def test_decode_context_grows_by_one_token_per_step() -> None:
    assert advance_load(decode(3, 10), 2)[:5] == (0, 0, 0, 3, 16)


@pytest.mark.parametrize("table", [None, [[0, 0.0], [60, 0.6], [70, 0.9]]])
def test_forecast_equals_executed_steps(table: list[list[float]] | None) -> None:
    terms = PLAIN["terms"]
    if table:
        terms = [*terms[:2], {"name": "context", "feature": "decode_context", "table": table}]
    step_by_step, ahead = executor(terms=terms), executor(terms=terms)
    load = decode(3, 50)
    expected = [step_by_step.run(advance_load(load, k)) for k in range(1, 9)]
    assert list(ahead.forecast_steps(load, 8)) == expected
    assert ahead.busy == 0.0
    ahead.ran(load, expected[:5])
    assert ahead.busy == pytest.approx(sum(expected[:5]))


def test_time_in_isolation_is_prefill_plus_decodes_at_mean_context() -> None:
    # 10 tokens in 2 s, then four decodes with a context of 10 to 13 tokens
    assert executor().alone(10, 5) == pytest.approx(2.0 + 4 * (1 + 0.12))
    assert executor().alone(10, 1) == pytest.approx(2.0)


# The range


def test_time_outside_the_range_is_recorded() -> None:
    found = executor()
    found.run(prefill(200))  # 21 s
    found.run(decode(1, 100))  # 2 s
    found.run(decode(6, 100))  # 2 s
    found.run(decode(3, 100))
    assert found.outside == pytest.approx({"prefill_tokens": 21.0, "decode_seqs": 4.0})
    assert found.extremes == {"prefill_tokens": (200, 200), "decode_seqs": (1, 6)}


def test_range_includes_its_ends_and_ignores_absent_features() -> None:
    found = executor()
    found.run(prefill(1))
    found.run(prefill(100))
    found.run(decode(2, 1))
    found.run(decode(4, 1))
    assert found.outside == {}


def test_forecast_steps_outside_the_range_are_recorded() -> None:
    ranged = {"decode_context": [0, 55]}
    step_by_step, leaping = executor(range=ranged), executor(range=ranged)
    load = decode(2, 50)
    for k in range(1, 7):
        step_by_step.run(advance_load(load, k))
    leaping.ran(load, leaping.forecast_steps(load, 6))
    assert leaping.outside == pytest.approx(step_by_step.outside)
    assert leaping.extremes == step_by_step.extremes == {"decode_context": (56, 62)}
    assert leaping.busy == pytest.approx(step_by_step.busy)
