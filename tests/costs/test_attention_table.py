"""Tests of attention times: a step is looked up as an equivalent measured batch."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from simkv.costs.attention_table import AttentionCost, AttentionTable
from simkv.costs.step_load import StepLoad, count_attention_pairs


def slice_(tokens: int, seqs: int, *rows: tuple[int, dict[int, float]]) -> dict[str, Any]:
    return {
        "prefill_tokens": tokens,
        "decode_seqs": seqs,
        "rows": [
            {"prefill_context": c, "decode_context": list(at), "seconds": list(at.values())}
            for c, at in rows
        ],
    }


DECODES = [slice_(0, 1, (0, {100: 1.0, 300: 3.0})), slice_(0, 3, (0, {100: 3.0, 300: 9.0}))]
PREFILLS = [
    slice_(10, 0, (0, {0: 2.0}), (100, {0: 4.0})),
    slice_(30, 0, (0, {0: 8.0}), (100, {0: 12.0})),
]
MIXED = [
    slice_(10, 1, (0, {100: 5.0, 300: 9.0})),
    slice_(30, 1, (0, {100: 11.0, 300: 15.0})),
    slice_(10, 3, (0, {100: 7.0, 300: 13.0})),
    slice_(30, 3, (0, {100: 13.0, 300: 19.0})),
]


def cost(*slices: dict[str, Any], skew: dict[str, Any] | None = None) -> AttentionCost:
    return AttentionCost(AttentionTable.model_validate({"slices": list(slices), "skew": skew}))


def prefill(*chunks: tuple[int, int], seqs: int = 0, context: int = 0) -> StepLoad:
    tokens = sum(n for n, _ in chunks)
    before = sum(c for _, c in chunks)
    total = sum(count_attention_pairs(n, c) for n, c in chunks)
    return StepLoad(len(chunks), tokens, before, seqs, context, total, seqs + len(chunks))


def test_interpolates_decodes_at_their_mean_context() -> None:
    found = cost(*DECODES, *PREFILLS, *MIXED)
    assert found(StepLoad(0, 0, 0, 1, 200)) == 2.0
    assert found(StepLoad(0, 0, 0, 2, 400)) == 4.0  # between 2 s for one decode and 6 s for three
    assert found(StepLoad(0, 0, 0, 3, 900)) == 9.0
    assert found(StepLoad(0, 0, 0, 5, 1500)) == 15.0  # extrapolated beyond three decodes


def test_interpolates_prefills_by_length_and_cached_tokens() -> None:
    found = cost(*DECODES, *PREFILLS, *MIXED)
    assert found(prefill((10, 0))) == 2.0
    assert found(prefill((20, 0))) == 5.0
    assert found(prefill((10, 50))) == 3.0
    assert found(prefill((20, 50))) == 6.5


def test_several_prefills_count_as_one_with_equal_pairs() -> None:
    found = cost(*DECODES, *PREFILLS, *MIXED)
    whole = prefill((10, 100), (10, 100))
    before = (whole.prefill_pairs - 210) / 20
    assert found(whole) == pytest.approx(5.0 + (before / 100) * 3.0)
    # Two short prompts have fewer query-key pairs than one prompt with the same number of tokens.
    short = prefill((10, 0), (10, 0))
    assert found(short) == pytest.approx(2.0 + (5.0 - 2.0) * 110 / 210)
    assert found(prefill((10, 0))) < found(short) < found(prefill((20, 0)))


def test_mixed_steps_use_measured_mixed_batches() -> None:
    found = cost(*DECODES, *PREFILLS, *MIXED)
    assert found(prefill((10, 0), seqs=1, context=100)) == 5.0
    assert found(prefill((20, 0), seqs=2, context=400)) == pytest.approx((7 + 13 + 10 + 16) / 4)


def test_mixed_steps_without_measurements_cost_the_sum() -> None:
    found = cost(*DECODES, *PREFILLS)
    assert found(prefill((10, 0), seqs=3, context=900)) == 2.0 + 9.0


SKEW = {
    "default": 0.25,
    "decode_seqs": [2, 1000],
    "rate": [0.5, 1.0],
    "longest": [250, 10_000],
    "prefill_context": [0, 10_000],
    "shares": [(0, 1, 0, 1, 0, 0.5)],
}


@pytest.mark.parametrize(
    ("shortest", "longest", "seconds"),
    [
        (200, 200, 6.0),  # equal contexts: no correction
        # mean context in the middle (bucket 0), longest context in bucket 1
        (100, 300, 6.0 + 0.5 * 3.0),
        (50, 250, 6.0 + 0.25 * 1.5),  # no such bucket: the default
    ],
)
def test_skew_interpolates_between_mean_and_longest_context(
    shortest: int, longest: int, seconds: float
) -> None:
    found = cost(*DECODES, *PREFILLS, skew=SKEW)
    assert found.needs_decode_range
    assert not cost(*DECODES, *PREFILLS).needs_decode_range
    load = StepLoad(0, 0, 0, 3, 600, 0, 3, shortest, longest)
    assert found(load) == pytest.approx(seconds)


@pytest.mark.parametrize(("tokens", "share"), [(10, 0.75), (13, 0.75), (22, 0.1), (500, 0.1)])
def test_mixed_steps_use_the_skew_of_the_nearest_prefill(tokens: int, share: float) -> None:
    shares = [(10, 1, 0, 1, 0, 0.75), (40, 1, 0, 1, 0, 0.1), (0, 1, 0, 1, 0, 0.5)]
    found = cost(*DECODES, *PREFILLS, *MIXED, skew={**SKEW, "shares": shares})
    even, longest = (
        StepLoad(1, tokens, 0, 3, 3 * n, count_attention_pairs(tokens, 0), 4, n, n)
        for n in (200, 300)
    )
    uneven = StepLoad(1, tokens, 0, 3, 600, count_attention_pairs(tokens, 0), 4, 100, 300)
    assert found(uneven) == pytest.approx(found(even) + share * (found(longest) - found(even)))


@pytest.mark.parametrize(
    ("slices", "complaint"),
    [
        (DECODES, "slices with only prefills"),
        (PREFILLS, "slices with only decodes"),
        ([*DECODES, *PREFILLS, DECODES[0]], "duplicate pair"),
        ([slice_(10, 0, (100, {0: 1.0}), (0, {0: 1.0})), *DECODES], "be strictly increasing"),
        ([slice_(0, 1, (0, {300: 1.0, 100: 3.0})), *PREFILLS], "be strictly increasing"),
    ],
)
def test_rejects_invalid_tables(slices: list[dict[str, Any]], complaint: str) -> None:
    with pytest.raises(ValidationError, match=complaint):
        AttentionTable.model_validate({"slices": slices})
