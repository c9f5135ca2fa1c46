"""Steps as long as a profile says, and how much of them was outside the profile's range."""

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


# What a batch is


def test_a_batch_of_prefills() -> None:
    batch = Batch(scheduled=[(0, 10), (1, 1)], context=[0, 7], kind="prefill")
    assert compute_step_load(batch)[:5] == (2, 11, 7, 0, 0)  # one token is a prefill here, too


def test_a_batch_of_decodes() -> None:
    batch = Batch(scheduled=[(0, 1), (1, 1)], context=[5, 7], kind="decode")
    assert compute_step_load(batch)[:5] == (0, 0, 0, 2, 12)


def test_a_decode_group_counts_beside_the_rows() -> None:
    batch = Batch(scheduled=[(0, 1)], context=[5], kind="decode", decodes=3, decode_context=40)
    assert compute_step_load(batch)[:5] == (0, 0, 0, 4, 45)
    batch = Batch(scheduled=[(0, 9)], context=[5], kind="mixed", decodes=3, decode_context=40)
    assert compute_step_load(batch)[:5] == (1, 9, 5, 3, 40)


def test_in_a_mixed_batch_one_token_on_top_of_kv_is_a_decode() -> None:
    batch = Batch(scheduled=[(0, 10), (1, 1), (2, 1)], context=[4, 7, 0], kind="mixed")
    assert compute_step_load(batch)[:5] == (2, 11, 4, 1, 7)


def test_an_idle_batch_is_nothing() -> None:
    assert compute_step_load(Batch())[:5] == (0, 0, 0, 0, 0)


# Seconds


def test_a_step_takes_what_the_profile_says() -> None:
    found = executor()
    assert found.run(prefill(20)) == pytest.approx(3.0)
    assert found.run(decode(2, 50)) == pytest.approx(1.5)
    assert found.busy == pytest.approx(4.5)
    assert found.idle() == 0.5
    assert found.outside == {}


def test_decodes_read_one_token_more_each_with_every_step() -> None:
    assert advance_load(decode(3, 10), 2)[:5] == (0, 0, 0, 3, 16)


@pytest.mark.parametrize("table", [None, [[0, 0.0], [60, 0.6], [70, 0.9]]])
def test_what_is_foreseen_is_what_would_be_run(table: list[list[float]] | None) -> None:
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


def test_the_time_alone_is_a_prefill_and_the_decodes_at_their_mean_context() -> None:
    # 10 tokens in 2 s, then four decodes with 10 to 13 tokens before them
    assert executor().alone(10, 5) == pytest.approx(2.0 + 4 * (1 + 0.12))
    assert executor().alone(10, 1) == pytest.approx(2.0)


# The range


def test_steps_outside_the_range_are_counted_by_their_time() -> None:
    found = executor()
    found.run(prefill(200))  # 21 s
    found.run(decode(1, 100))  # 2 s
    found.run(decode(6, 100))  # 2 s
    found.run(decode(3, 100))
    assert found.outside == pytest.approx({"prefill_tokens": 21.0, "decode_seqs": 4.0})
    assert found.extremes == {"prefill_tokens": (200, 200), "decode_seqs": (1, 6)}


def test_both_ends_belong_to_the_range_and_what_is_absent_is_not_outside() -> None:
    found = executor()
    found.run(prefill(1))
    found.run(prefill(100))
    found.run(decode(2, 1))
    found.run(decode(4, 1))
    assert found.outside == {}


def test_a_leap_counts_its_steps_outside_one_by_one() -> None:
    ranged = {"decode_context": [0, 55]}
    step_by_step, leaping = executor(range=ranged), executor(range=ranged)
    load = decode(2, 50)
    for k in range(1, 7):
        step_by_step.run(advance_load(load, k))
    leaping.ran(load, leaping.forecast_steps(load, 6))
    assert leaping.outside == pytest.approx(step_by_step.outside)
    assert leaping.extremes == step_by_step.extremes == {"decode_context": (56, 62)}
    assert leaping.busy == pytest.approx(step_by_step.busy)
