"""Tests of errors of step times outside the range of a profile."""

from __future__ import annotations

from math import exp, hypot, inf, log
from typing import Any

import pytest

from simkv.costs.attention_table import AttentionRow, AttentionSlice, AttentionTable
from simkv.costs.cost_profile import CostProfile, ErrorSource
from simkv.costs.held_out_errors import compute_extrapolation_errors
from simkv.costs.profile_uncertainty import (
    OutOfRangeMargin,
    combine_ends,
    compute_scales,
    doublings,
    error_ends,
    find_sources,
    unknown_share,
)
from simkv.costs.scaled_executor import ScaledExecutor
from simkv.costs.simulated_executor import SimulatedExecutor, advance_load
from simkv.costs.step_load import StepLoad


def profile(**fit: Any) -> CostProfile:
    return CostProfile.model_validate(
        {
            "name": "p",
            "engine": "e",
            "model": "m",
            "gpu": "g",
            "basis": "measured",
            "terms": [{"name": "step", "feature": "steps", "seconds": 0.01}],
            "idle_pass_s": 1e-5,
            "range": {"decode_seqs": (1, 4), "decode_context": (100, 800)},
            "fit": {"points": 9, **fit},
            "source": [],
        }
    )


def test_error_grows_per_doubling_and_axes_add_in_quadrature() -> None:
    wider = OutOfRangeMargin(profile(beyond={"decode_seqs": 0.1, "decode_context": 0.2}))
    assert wider(StepLoad(0, 0, 0, 4, 800)) == 0.0
    assert wider(StepLoad(0, 0, 0, 8, 800)) == pytest.approx(0.1)
    assert wider(StepLoad(0, 0, 0, 1, 25)) == pytest.approx(0.4)
    assert wider(StepLoad(0, 0, 0, 16, 1600)) == pytest.approx(hypot(0.2, 0.2))
    assert not OutOfRangeMargin(profile())


def test_values_above_an_empty_range_are_infinitely_far() -> None:
    assert doublings(1.0, 0.0, 0.0) == inf
    assert doublings(3.0, 1.0, 4.0) == 0.0


def test_leaps_count_the_same_busy_time_as_single_steps() -> None:
    """The fractions of busy time agree with the profile's own step times."""
    load, scale = StepLoad(0, 0, 0, 8, 400), {"decode": 500.0, "prefill": 1.0, "mixed": 1.0}
    for wider in (None, OutOfRangeMargin(profile(beyond={"decode_seqs": 0.1}))):
        stepped, leaped = SimulatedExecutor(profile()), SimulatedExecutor(profile())
        for step in range(1, 6):
            ScaledExecutor(stepped, scale, wider).run(advance_load(load, step))
        leaping = ScaledExecutor(leaped, scale, wider)
        leaping.ran(load, list(leaping.forecast_steps(load, 5)))
        assert leaped.busy == pytest.approx(stepped.busy)
        assert leaped.outside == pytest.approx(stepped.outside)
        assert stepped.outside["decode_seqs"] == pytest.approx(0.05)


def test_steps_outside_the_range_have_larger_errors() -> None:
    wider = OutOfRangeMargin(profile(beyond={"decode_seqs": 0.1, "decode_context": 0.1}))
    source = ErrorSource(name="costs", ends=dict.fromkeys(("decode", "prefill"), (-0.05, 0.05)))
    source = source.model_copy(update={"ends": {**source.ends, "mixed": (-0.05, 0.05)}})
    for side, sign in (("faster", -1.0), ("slower", 1.0)):
        scaled = ScaledExecutor(
            SimulatedExecutor(profile()),
            compute_scales([source], side),
            wider,  # type: ignore[arg-type]
        )
        assert scaled.run(StepLoad(0, 0, 0, 4, 400)) == pytest.approx(0.01 * exp(sign * 0.05))
        error = hypot(1 - exp(-sign * 0.05), 0.1)
        assert scaled.run(StepLoad(0, 0, 0, 8, 800)) == pytest.approx(0.01 / (1 - sign * error))
        start = StepLoad(0, 0, 0, 4, 796)
        assert scaled.forecast_steps(start, 3) == pytest.approx(
            [scaled.run(StepLoad(0, 0, 0, 4, context)) for context in (800, 804, 808)]
        )
        assert abs(scaled.forecast_steps(start, 3)[2] / 0.01 - 1) > 0.047


def test_sources_combine_on_each_side_by_themselves() -> None:
    assert combine_ends([(-0.3, 0.1), (-0.4, 0.0)]) == pytest.approx((-0.5, 0.1))
    one = ErrorSource(name="a", ends=dict.fromkeys(("decode", "prefill", "mixed"), (-0.3, 0.1)))
    two = ErrorSource(name="b", ends=dict.fromkeys(("decode", "prefill", "mixed"), (-0.4, 0.0)))
    assert compute_scales([one, two], "faster")["mixed"] == pytest.approx(exp(-0.5))
    assert compute_scales([one, two], "slower")["decode"] == pytest.approx(exp(0.1))


def test_own_sources_replace_the_error_of_held_out_steps() -> None:
    error = {"points": 9, "median": 0.0, "p95": 0.25, "bias": 0.0}
    measured = profile(held_out={"all": error})
    (own,) = find_sources(measured)
    size = hypot(0.25 / 3, 0.03)  # of the mean of 9 steps, and between runs
    assert own.ends["decode"] == pytest.approx((-log(1 + size), -log(1 - size)))
    ends = error_ends(measured.fit.held_out)["decode"]
    assert ends == pytest.approx((-log(1.25), -log(0.75)))
    composed = profile(
        held_out={"all": error}, sources=[{"name": "model", "ends": {"decode": [-0.1, 0.2]}}]
    )
    assert [source.name for source in find_sources(composed)] == ["model"]
    assert find_sources(profile()) == []


def test_unknown_share_excludes_features_with_known_errors() -> None:
    known = profile(beyond={"decode_seqs": 0.1})
    assert unknown_share(known, {"decode_seqs": 4.0, "decode_context": 1.0}, 10.0) == 0.1
    assert unknown_share(known, {"decode_seqs": 4.0}, 10.0) == 0.0


def test_extrapolation_errors_come_from_the_ends_of_a_table() -> None:
    def row(*seconds: float) -> AttentionRow:
        return AttentionRow(
            prefill_context=0, decode_context=[100, 200, 400], seconds=list(seconds)
        )

    table = AttentionTable(
        slices=[
            AttentionSlice(prefill_tokens=0, decode_seqs=1, rows=[row(1.0, 2.0, 5.0)]),
            AttentionSlice(
                prefill_tokens=16,
                decode_seqs=0,
                rows=[AttentionRow(prefill_context=0, decode_context=[0], seconds=[1.0])],
            ),
        ]
    )
    # The line through 1 s and 2 s gives 4 s at 400. The measured time is 5 s, and the rest of a
    # step takes 5 s.
    assert compute_extrapolation_errors(table, lambda load: 5.0) == {
        "decode_mean": pytest.approx(0.1)
    }
