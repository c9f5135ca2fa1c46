"""A composed profile with the constants of a calibration in it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from simkv.costs.grid import AttentionGrid
from simkv.costs.operators.constants import Constants
from simkv.costs.operators.curve import rounded
from simkv.costs.profile import Feature, Profile, Term, When

#: What a constant may scale by itself, by the name of the term; others only by the kind of step.
KINDS: dict[str, Literal["products", "experts", "collectives"]] = {
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


def with_constants(profile: Profile, constants: Constants) -> Profile:
    """``profile`` as changed by ``constants``; itself where they change nothing."""
    if constants == Constants():
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


def _grid(grid: AttentionGrid, constants: Constants) -> AttentionGrid:
    prefill = constants.prefill_attention * constants.prefill
    decode = constants.decode_attention * constants.decode
    return grid.model_copy(
        update={
            "prefill_s": [rounded(prefill * s for s in row) for row in grid.prefill_s],
            "decode_s": [rounded(decode * s for s in row) for row in grid.decode_s],
        }
    )


def _scaled(term: Term, constants: Constants) -> Iterable[Term]:
    """One term, or one for each kind of step where they are scaled by themselves."""
    if term.table is None:  # what the host takes is no operator
        return [term]
    kind = KINDS.get(term.name)
    own = getattr(constants, kind) if kind else 1.0
    xs, ys = zip(*term.table, strict=True)
    return [
        term.model_copy(
            update={
                "when": when,
                "table": list(zip(xs, rounded(own * factor * y for y in ys), strict=True)),
            }
        )
        for when, factor in _kinds(term.when, constants)
    ]


def _kinds(when: When, constants: Constants) -> list[tuple[When, float]]:
    if constants.prefill == constants.decode:
        return [(when, constants.prefill)]
    both: list[tuple[When, float]] = [
        ("prefill", constants.prefill),
        ("pure decode", constants.decode),
    ]
    return both if when == "any" else [pair for pair in both if pair[0] == when]


def _added(constants: Constants) -> list[Term]:
    """The seconds of a calibration."""
    given: list[tuple[Feature, When, float]] = [
        ("steps", "prefill", constants.prefill_step_s),
        ("steps", "any", constants.step_s),
        ("decode_seqs", "any", constants.seq_s),
        ("prefill_seqs", "any", constants.seq_s),
    ]
    return [
        Term(name=f"calibration, {feature}", feature=feature, when=when, seconds=seconds)
        for feature, when, seconds in given
        if seconds > 0.0
    ]
