"""Cost of whole steps in excess of the sum of their parts, measured in isolation."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from simkv.costs.cost_profile import (
    CostProfile,
    CostTerm,
    LinearPiece,
    StepCost,
    StepFilter,
)
from simkv.costs.step_load import StepLoad

Floats = npt.NDArray[np.float64]
#: Kinds of steps with separate constants, and whether steps of the kind contain prefills.
KINDS: tuple[tuple[StepFilter, bool], ...] = (("pure decode", False), ("prefill", True))


def fit_whole_steps(
    profile: CostProfile, steps: Sequence[tuple[StepLoad, float]], name: str
) -> list[CostTerm]:
    """Scale the terms of a profile to match ``steps``, given as pairs (load, seconds).

    For each kind of step, one factor scales attention, another factor scales all other terms, and a
    constant term called ``name`` is added. Parts measured in isolation need factors because they
    run at other clocks and without overlap.
    """
    terms = device_profile(profile).terms
    groups = [[t for t in terms if _is_attention(t) is mine] for mine in (True, False)]
    costs = [StepCost(profile.model_copy(update={"terms": g, "floor": None})) for g in groups]
    terms = profile.terms
    for when, prefills in KINDS:
        alike = [(load, taken) for load, taken in steps if bool(load.prefill_seqs) is prefills]
        if alike:
            seconds = np.array([taken for _, taken in alike])
            parts = np.array([[cost(load) for cost in costs] for load, _ in alike])
            shares = _shares(parts, seconds)
            beyond = float(np.median(seconds - parts @ shares))
            terms = [
                piece
                for term in terms
                for piece in _scaled_when(
                    term, when, float(shares[0 if _is_attention(term) else 1])
                )
            ]
            terms.append(constant_term(f"{name}, {when}", beyond, when))
    return terms


def _is_attention(term: CostTerm) -> bool:
    return "attention" in term.name and not term.name.startswith("all but")


#: Weight of the prior that a whole step takes the sum of its parts, relative to one measured step.
SUM_OF_PARTS = 0.3
#: Number of rounds of reweighting, and the difference at which a step has the same weight as the
#: prior.
ROUNDS, SATURATION_ERROR = 20, 1e-2
#: Minimum factor on a group of terms.
MIN_SHARE = 0.2


def _shares(parts: Floats, seconds: Floats) -> Floats:
    """Fit factors on the columns of ``parts``, and a constant, by least relative differences.

    Absolute instead of squared differences give less weight to outliers.
    """
    count = parts.shape[1]
    rows = np.hstack((parts, np.ones((len(parts), 1)))) / seconds[:, None]
    prior = SUM_OF_PARTS * np.eye(count, count + 1)
    rows = np.vstack((rows, prior))
    wanted = np.append(np.ones(len(parts)), np.full(count, SUM_OF_PARTS))
    weights = np.ones(len(rows))
    found = np.ones(count + 1)
    for _ in range(ROUNDS):
        found, *_ = np.linalg.lstsq(rows * weights[:, None], wanted * weights, rcond=None)
        off = np.abs(rows @ found - wanted)
        weights = 1.0 / np.sqrt(np.maximum(off, 1e-3))
        weights[-count:] = 1.0 / np.sqrt(SATURATION_ERROR)
    return np.maximum(found[:count], MIN_SHARE)


#: Conditions of a term that apply to each kind of step.
SPLIT_CONDITIONS: dict[StepFilter, tuple[StepFilter, ...]] = {
    "pure decode": ("pure decode",),
    "prefill": ("prefill", "mixed"),
}


def _scaled_when(term: CostTerm, when: StepFilter, share: float) -> list[CostTerm]:
    """Scale a term by ``share`` in steps of one kind. A term for several kinds is split."""
    if is_host_term(term) or term.when == "any":
        return [term]
    if term.when == "decode":
        parts: tuple[StepFilter, ...] = ("pure decode", "mixed")
        return [
            t
            for part in parts
            for t in _scaled_when(term.model_copy(update={"when": part}), when, share)
        ]
    return [scaled_term(term, share) if term.when in SPLIT_CONDITIONS[when] else term]


def scaled_term(term: CostTerm, share: float) -> CostTerm:
    """Return the term multiplied by ``share``."""
    if term.pieces is None:
        return term.model_copy(update={"seconds": share * (term.seconds or 0.0)})
    pieces = [
        piece.model_copy(update={"base": share * piece.base, "slope": share * piece.slope})
        for piece in term.pieces
    ]
    return term.model_copy(update={"pieces": pieces})


def constant_term(name: str, seconds: float, when: StepFilter) -> CostTerm:
    """Return a term of constant seconds per step. The constant may be negative."""
    return CostTerm(name=name, feature="steps", when=when, pieces=[LinearPiece(base=seconds)])


def device_profile(profile: CostProfile) -> CostProfile:
    """Return the profile without the terms for host time."""
    terms = [term for term in profile.terms if not is_host_term(term)]
    return profile.model_copy(update={"terms": terms})


def is_host_term(term: CostTerm) -> bool:
    """Return whether the term is for the host's work."""
    return term.name.startswith("host")
