"""Apply the constants of a calibration to a composed profile."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from simkv.costs.attention_grid import AttentionGrid
from simkv.costs.cost_profile import (
    CostProfile,
    CostTerm,
    Feature,
    StepFilter,
)
from simkv.costs.operators.calibration_rules import CostConstants
from simkv.costs.operators.piecewise_curve import round_to_four_digits

#: The constant that scales a term, by term name. In addition, all terms are scaled by kind of step.
TERM_CONSTANTS: dict[str, Literal["products", "experts", "collectives"]] = {
    "products of attention": "products",
    "products of the MLP": "products",
    "shared expert": "products",
    "router": "products",
    "absorbed projections": "products",
    "head": "products",
    "experts": "experts",
    "all-reduce": "collectives",
    "all-gather of logits": "collectives",
    "tokens to experts and back": "collectives",
}


def apply_constants(profile: CostProfile, constants: CostConstants) -> CostProfile:
    """Return ``profile`` with the constants applied; the same object if they change nothing."""
    if constants == CostConstants():
        return profile
    terms = [scaled for term in profile.terms for scaled in _scaled(term, constants)]
    grid = profile.grid and _grid(profile.grid, constants)
    return profile.model_copy(
        update={
            "terms": [*terms, *_added(constants)],
            "grid": grid,
            "front_s": profile.front_s + max(constants.front_s, 0.0),
        }
    )


def _grid(grid: AttentionGrid, constants: CostConstants) -> AttentionGrid:
    prefill = constants.prefill_attention * constants.prefill
    decode = constants.decode_attention * constants.decode
    return grid.model_copy(
        update={
            "prefill_s": [round_to_four_digits(prefill * s for s in row) for row in grid.prefill_s],
            "decode_s": [round_to_four_digits(decode * s for s in row) for row in grid.decode_s],
        }
    )


def _scaled(term: CostTerm, constants: CostConstants) -> Iterable[CostTerm]:
    """Return the scaled term, or one term for each kind of step if their factors differ."""
    if term.table is None:  # host time is not an operator
        return [term]
    kind = TERM_CONSTANTS.get(term.name)
    own = getattr(constants, kind) if kind else 1.0
    xs, ys = zip(*term.table, strict=True)
    return [
        term.model_copy(
            update={
                "when": when,
                "table": list(
                    zip(xs, round_to_four_digits(own * factor * y for y in ys), strict=True)
                ),
            }
        )
        for when, factor in _kinds(term.when, constants)
    ]


def _kinds(when: StepFilter, constants: CostConstants) -> list[tuple[StepFilter, float]]:
    if constants.prefill == constants.decode:
        return [(when, constants.prefill)]
    both: list[tuple[StepFilter, float]] = [
        ("prefill", constants.prefill),
        ("pure decode", constants.decode),
    ]
    return both if when == "any" else [pair for pair in both if pair[0] == when]


def _added(constants: CostConstants) -> list[CostTerm]:
    """Return cost terms for the seconds that a calibration adds."""
    given: list[tuple[Feature, StepFilter, float]] = [
        ("steps", "prefill", constants.prefill_step_s),
        ("steps", "any", constants.step_s),
        ("decode_seqs", "any", constants.seq_s),
        ("prefill_seqs", "any", constants.seq_s),
    ]
    return [
        CostTerm(name=f"calibration, {feature}", feature=feature, when=when, seconds=seconds)
        for feature, when, seconds in given
        if seconds > 0.0
    ]
