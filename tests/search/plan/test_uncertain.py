"""How sure an answer is, against drawing it."""

from __future__ import annotations

import math
import random

import pytest

from simkv.costs.profile import Fit, StepError, load_profile
from simkv.costs.widening import RUNS, scales_of
from simkv.search.plan.uncertain import Answers, coverage_of_range, error_of, most_violated, spread


def test_spread() -> None:
    assert spread([3, 1, 2]) == Answers(1, 3)
    assert spread([3, None]) == Answers(3, None)
    assert spread([None]) == Answers(None, None)


def test_the_range_encloses_the_median_as_often_as_it_says() -> None:
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


def test_at_most_so_many_violate() -> None:
    for repeats in (1, 6, 59):
        share = most_violated(repeats)
        assert (1 - share) ** repeats == pytest.approx(0.05)
    assert most_violated(59) < 0.05


def test_the_error_of_a_profile() -> None:
    profile = load_profile("l4-mistralrs-pr2034")
    assert error_of(profile, None).factors == {}
    assert "knows no error" in error_of(profile, None).note
    given = error_of(profile, 0.25).factors
    assert given["cheaper"]["decode"] == pytest.approx(0.8)
    assert given["dearer"]["mixed"] == pytest.approx(4 / 3)
    assert error_of(profile, 0.0).factors == {}
    known = {"decode": StepError(points=9, median=0.01, p95=0.1, bias=0.0)}
    measured = profile.model_copy(update={"fit": Fit(points=9, held_out=known)})
    found = error_of(measured, None)
    assert found.own
    assert found.factors["cheaper"]["decode"] == pytest.approx(1 / (1 + math.hypot(0.1, RUNS)))
    assert found.factors == {s: scales_of(measured, s) for s in ("cheaper", "dearer")}  # type: ignore[arg-type]
    assert not error_of(measured, 0.25).own
    assert error_of(measured, 0.25).factors == given
