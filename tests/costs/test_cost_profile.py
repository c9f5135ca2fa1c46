"""Tests of cost profiles: step costs, their range, and rejection of invalid profiles."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simkv.core.errors import InputError
from simkv.costs.cost_profile import (
    CostProfile,
    StepCost,
    load_profile,
    packaged_profiles,
)
from simkv.costs.cost_terms import compute_feature
from simkv.costs.step_load import StepLoad

PREFILL = StepLoad(2, 100, 40, 0, 0)
DECODE = StepLoad(0, 0, 0, 4, 80)
MIXED = StepLoad(1, 50, 0, 3, 60)
PLAIN: dict[str, Any] = {
    "name": "test",
    "engine": "any",
    "model": "none",
    "gpu": "none",
    "basis": "assumed",
    "terms": [{"name": "a step", "feature": "steps", "seconds": 1.0}],
    "idle_pass_s": 0.5,
    "range": {},
    "fit": {"points": 0},
    "source": [],
}


def profile(*terms: dict[str, Any], **more: Any) -> CostProfile:
    named = [{"name": f"term {i}", **term} for i, term in enumerate(terms)]
    return CostProfile.model_validate({**PLAIN, **({"terms": named} if terms else {}), **more})


def cost(load: StepLoad, *terms: dict[str, Any]) -> float:
    return StepCost(profile({"feature": "steps", "seconds": 1e-9}, *terms))(load)


@pytest.mark.parametrize(
    ("feature", "values"),
    [
        ("steps", (1, 1, 1)),
        ("prefill_seqs", (2, 0, 1)),
        ("prefill_tokens", (100, 0, 50)),
        ("prefill_context", (40, 0, 0)),
        ("decode_seqs", (0, 4, 3)),
        ("decode_context", (0, 80, 60)),
        ("tokens", (100, 4, 53)),
    ],
)
def test_computes_features_of_a_step(feature: Any, values: tuple[int, int, int]) -> None:
    assert tuple(compute_feature(load, feature) for load in (PREFILL, DECODE, MIXED)) == values


def test_seconds_are_per_unit_and_terms_are_summed() -> None:
    terms = (
        {"feature": "prefill_tokens", "seconds": 0.01},
        {"feature": "decode_seqs", "seconds": 0.1},
    )
    assert cost(PREFILL, *terms) == pytest.approx(1.0)
    assert cost(DECODE, *terms) == pytest.approx(0.4)
    assert cost(MIXED, *terms) == pytest.approx(0.5 + 0.3)


@pytest.mark.parametrize(
    ("when", "paid"), [("any", (2, 2, 2)), ("prefill", (2, 0, 2)), ("decode", (0, 2, 2))]
)
def test_terms_may_apply_to_prefills_or_decodes_only(when: str, paid: tuple[int, int, int]) -> None:
    found = [
        cost(load, {"feature": "steps", "when": when, "seconds": 2.0})
        for load in (PREFILL, DECODE, MIXED)
    ]
    assert found == pytest.approx(paid, abs=1e-6)


@pytest.mark.parametrize(("seqs", "seconds"), [(1, 1.1), (8, 1.8), (9, 5.9), (10, 6.0), (11, 7.0)])
def test_pieces_include_their_upper_limit(seqs: int, seconds: float) -> None:
    pieces = [
        {"up_to": 8, "base": 1.0, "slope": 0.1},
        {"up_to": 10, "base": 5.0, "slope": 0.1},
        {"base": 7.0},
    ]
    found = cost(StepLoad(0, 0, 0, seqs, 0), {"feature": "decode_seqs", "pieces": pieces})
    assert found == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("tokens", "seconds"), [(10, 1.0), (20, 3.0), (15, 2.0), (60, 5.0), (100, 7.0), (0, 0.0)]
)
def test_tables_interpolate_and_extrapolate_linearly(tokens: int, seconds: float) -> None:
    table = [[10, 1.0], [20, 3.0], [60, 5.0]]
    found = cost(StepLoad(1, tokens, 0, 0, 0), {"feature": "prefill_tokens", "table": table})
    # the extrapolated cost at 0 is -1, but costs are never below 0
    assert found == pytest.approx(seconds, abs=1e-6)


def test_table_with_one_point_is_constant() -> None:
    assert cost(DECODE, {"feature": "decode_context", "table": [[5, 2.0]]}) == pytest.approx(2.0)


def test_step_times_are_never_negative() -> None:
    falling = profile(
        {"feature": "steps", "seconds": 1.0},
        {"feature": "decode_seqs", "pieces": [{"base": 0.0, "slope": -0.1}]},
    )
    assert StepCost(falling)(StepLoad(0, 0, 0, 5, 0)) == pytest.approx(0.5)
    assert StepCost(falling)(StepLoad(0, 0, 0, 50, 0)) == 0.0


@given(st.integers(1, 50), st.integers(0, 500))
def test_linear_decode_cost_equals_the_sum_of_terms(seqs: int, context: int) -> None:
    terms = (
        {"feature": "steps", "seconds": 0.1},
        {"feature": "decode_seqs", "table": [[1, 0.1], [8, 0.2], [9, 0.9]]},
        {"feature": "tokens", "seconds": 0.003},
        {"feature": "decode_context", "when": "decode", "seconds": 1e-4},
        {"feature": "decode_context", "when": "prefill", "seconds": 7.0},
    )
    by_hand = sum(
        cost(StepLoad(0, 0, 0, seqs, context), term)
        for term in terms
        if term.get("when") != "prefill"
    )
    found = StepCost(profile(*terms))
    assert found.linear
    assert found(StepLoad(0, 0, 0, seqs, context)) == pytest.approx(by_hand, abs=1e-7)
    base, slope = found.linear_decode_cost(seqs)
    assert base + slope * context == found(StepLoad(0, 0, 0, seqs, context))


def test_table_over_context_is_not_linear() -> None:
    curved = profile(
        {"feature": "steps", "seconds": 1.0},
        {"feature": "decode_context", "table": [[1, 0], [9, 1]]},
    )
    assert not StepCost(curved).linear


# Invalid profiles


@pytest.mark.parametrize(
    ("terms", "complaint"),
    [
        ([], "at least 1 item"),
        ([{"feature": "steps"}], "must have exactly one of seconds, pieces, table"),
        (
            [{"feature": "steps", "seconds": 1.0, "table": [[1, 1]]}],
            "must have exactly one of seconds, pieces, table",
        ),
        ([{"feature": "stepps", "seconds": 1.0}], "Input should be 'steps'"),
        ([{"feature": "steps", "seconds": -1.0}], "greater than or equal to 0"),
        ([{"feature": "steps", "seconds": float("nan")}], "finite"),
        ([{"feature": "steps", "seconds": 1.0, "typo": 1}], "Extra inputs"),
        ([{"feature": "steps", "table": []}], "at least 1 item"),
        ([{"feature": "steps", "table": [[1, 1], [1, 2]]}], "strictly increasing"),
        ([{"feature": "steps", "table": [[2, 1], [1, 2]]}], "strictly increasing"),
        ([{"feature": "steps", "table": [[1, float("inf")]]}], "finite"),
        ([{"feature": "steps", "pieces": [{"up_to": 3, "base": 1}]}], "null in the last piece"),
        (
            [{"feature": "steps", "pieces": [{"base": 1}, {"base": 2}]}],
            "pieces: up_to must increase",
        ),
        (
            [
                {
                    "feature": "steps",
                    "pieces": [{"up_to": 3, "base": 1}, {"up_to": 2, "base": 1}, {"base": 1}],
                }
            ],
            "pieces: up_to must increase",
        ),
        ([{"feature": "prefill_tokens", "seconds": 1.0}], "a decode step of one sequence must"),
        ([{"feature": "decode_seqs", "seconds": 1.0}], "a prefill step of one sequence must"),
        ([{"feature": "steps", "seconds": 0.0}], "must take at least"),
    ],
)
def test_rejects_invalid_terms(terms: list[Any], complaint: str) -> None:
    named = [{"name": "x", **term} for term in terms]
    with pytest.raises(ValueError, match=complaint):
        CostProfile.model_validate({**PLAIN, "terms": named})


@pytest.mark.parametrize(
    "change",
    [
        {"format": 2},
        {"idle_pass_s": 0},
        {"idle_pass_s": float("inf")},
        {"basis": "guessed"},
        {"range": {"steps": [1, float("nan")]}},
        {"range": {"typo": [1, 2]}},
        {"unknown": 1},
        {"source": "a string"},
    ],
)
def test_rejects_invalid_fields(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="validation error"):
        profile(**change)


# Locations of profiles


def test_packaged_profiles_are_valid_and_state_their_basis() -> None:
    assert "l4-mistralrs-pr2034" in packaged_profiles()
    assert "unit-step" in packaged_profiles()
    for name in packaged_profiles():
        found = load_profile(name)
        assert found.name == name
        assert found.source
        assert StepCost(found)(PREFILL) > 0


def test_l4_profiles_are_marked_as_fitted_to_published_figures() -> None:
    assert load_profile("l4-mistralrs-pr2031").basis == "fitted to published figures"
    assert load_profile("l4-mistralrs-pr2034").basis == "fitted to published figures"
    assert load_profile("l4-mistralrs-slow-prefill").basis == "assumed"


def test_finds_profiles_beside_the_scenario(tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_text(json.dumps(PLAIN))
    assert load_profile("mine.json", tmp_path).name == "test"


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("unit-stp", "unknown profile 'unit-stp' (did you mean 'unit-step'?); expected one of"),
        ("", "unknown profile ''"),
        ("../unit-step", "unknown profile"),
        ("nothing.json", "does not exist"),
        ("folder.json", "does not exist"),
    ],
)
def test_reports_missing_profiles(tmp_path: Path, name: str, complaint: str) -> None:
    (tmp_path / "folder.json").mkdir()
    with pytest.raises(InputError) as raised:
        load_profile(name, tmp_path)
    assert str(raised.value).startswith("profile: ")
    assert complaint in str(raised.value)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (b"", "mine.json: file: Invalid JSON"),
        (b"[]", "mine.json: file: "),
        (b"{", "mine.json: file: Invalid JSON"),
        (b'{"name": "x"}', "mine.json: engine: Field required"),
        (b"\xff\xfe", "mine.json: not UTF-8 text"),
        (b"[" * 100_000, "mine.json: file: Invalid JSON"),
        (json.dumps({**PLAIN, "terms": [{"name": "x"}]}).encode(), "mine.json: terms.0.feature"),
    ],
)
def test_rejects_files_that_are_no_profile(tmp_path: Path, text: bytes, complaint: str) -> None:
    (tmp_path / "mine.json").write_bytes(text)
    with pytest.raises(InputError) as raised:
        load_profile("mine.json", tmp_path)
    assert complaint in str(raised.value)
    assert "\n" not in str(raised.value)
