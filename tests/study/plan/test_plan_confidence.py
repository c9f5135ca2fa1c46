"""Tests of the confidence of an answer, compared with simulation."""

from __future__ import annotations

import math
import random

import pytest

from simkv.costs.cost_profile import FitQuality, StepError, load_profile
from simkv.costs.profile_uncertainty import RUN_VARIATION, compute_profile_scales
from simkv.study.plan.plan_confidence import (
    AnswerRange,
    bound_violated_share,
    coverage_of_range,
    find_answer_range,
    find_profile_error,
)


def test_answer_range() -> None:
    assert find_answer_range([3, 1, 2]) == AnswerRange(1, 3)
    assert find_answer_range([3, None]) == AnswerRange(3, None)
    assert find_answer_range([None]) == AnswerRange(None, None)


def test_range_contains_median_at_stated_confidence() -> None:
    draw = random.Random(3)
    median = math.log(2)
    for repeats in (2, 4, 6):
        tries = 4000
        hits = 0
        for _ in range(tries):
            values = [draw.expovariate(1.0) for _ in range(repeats)]
            hits += min(values) <= median <= max(values)
        said = coverage_of_range(repeats)
        assert abs(hits / tries - said) < 4 * math.sqrt(said * (1 - said) / tries)
    assert coverage_of_range(1) == 0.0
    assert coverage_of_range(6) > 0.95


def test_bound_of_violated_share() -> None:
    for repeats in (1, 6, 59):
        share = bound_violated_share(repeats)
        assert (1 - share) ** repeats == pytest.approx(0.05)
    assert bound_violated_share(59) < 0.05


def test_profile_error() -> None:
    profile = load_profile("l4-mistralrs-pr2034")
    assert find_profile_error(profile, None).factors == {}
    assert "is unknown" in find_profile_error(profile, None).note
    given = find_profile_error(profile, 0.25).factors
    assert given["faster"]["decode"] == pytest.approx(0.8)
    assert given["slower"]["mixed"] == pytest.approx(4 / 3)
    assert find_profile_error(profile, 0.0).factors == {}
    known = {"decode": StepError(points=9, median=0.01, p95=0.1, bias=0.0)}
    measured = profile.model_copy(update={"fit": FitQuality(points=9, held_out=known)})
    found = find_profile_error(measured, None)
    assert found.own
    assert found.factors["faster"]["decode"] == pytest.approx(
        1 / (1 + math.hypot(0.1, RUN_VARIATION))
    )
    assert found.factors == {s: compute_profile_scales(measured, s) for s in ("faster", "slower")}  # type: ignore[arg-type]
    assert not find_profile_error(measured, 0.25).own
    assert find_profile_error(measured, 0.25).factors == given
