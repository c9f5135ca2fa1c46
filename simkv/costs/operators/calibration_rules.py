"""Calibration of composed costs: factors and additional seconds for some configurations.

``constants.json`` lists rules with their conditions and sources. The conditions are a set of GPU
systems, an engine, a range of releases, a number format of the experts, or another property of a
``Configuration``. The factors of all rules that apply are multiplied, and their seconds are added.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from simkv.costs.attention_grid import AttentionGrid
from simkv.costs.cost_profile import CostProfile, CostTerm, Feature, StepFilter
from simkv.costs.frozen_model import FrozenModel
from simkv.costs.hardware.execution_settings_lookup import ExecutionSettings
from simkv.costs.hardware.replica_hardware import Hardware
from simkv.costs.operators.configuration_kind import classify_configuration
from simkv.costs.operators.operator_tables import version_key
from simkv.costs.operators.piecewise_curve import round_to_four_digits

#: Fields of a ``Configuration`` that may be conditions of a rule.
KindField = Literal["backend", "family", "gpu", "model", "attention", "experts", "weights", "mlp"]
Factor = Annotated[float, Field(gt=0)]
CONSTANTS_PATH = Path(__file__).with_name("constants.json")
#: Name of the constant that scales a term, by term name. The factor of the kind of step scales all
#: terms.
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


class CostConstants(FrozenModel):
    """Factors for operator times and for whole steps, and seconds that are added to steps.

    ``prefill`` scales steps with prefills, and ``decode`` scales other steps. ``prefill_step_s`` is
    added per step with prefills, ``step_s`` per step, and ``seq_s`` per sequence of a step.
    ``front_s`` is the time until the engine core receives a request.
    """

    products: Factor = 1.0
    experts: Factor = 1.0
    prefill_attention: Factor = 1.0
    decode_attention: Factor = 1.0
    collectives: Factor = 1.0
    prefill: Factor = 1.0
    decode: Factor = 1.0
    prefill_step_s: float = 0.0
    step_s: float = 0.0
    seq_s: float = 0.0
    front_s: float = 0.0

    def joined(self, other: CostConstants) -> CostConstants:
        """Return the combined constants: factors are multiplied and seconds are added."""
        mine, theirs = self.model_dump(), other.model_dump()
        return CostConstants(
            **{
                name: value + theirs[name] if name.endswith("_s") else value * theirs[name]
                for name, value in mine.items()
            }
        )


class ConstantsRule(FrozenModel):
    """Constants of a calibration, and the conditions under which they apply.

    A condition that is None always holds. ``source`` is the source of the constants.
    """

    systems: list[str] | None = None
    engine: str | None = None
    releases: tuple[str, str] | None = None  # range: from the first release, before the second
    experts: str | None = None  # a number format, or "none" for a dense model
    kind: dict[KindField, str] = Field(default={})
    constants: CostConstants
    source: str

    def fits(self, hardware: Hardware, setting: ExecutionSettings) -> bool:
        """Return whether the rule applies to the hardware and the engine settings."""
        experts = hardware.experts if hardware.architecture.experts else "none"
        first, end = self.releases or ("0", "9999")
        own = classify_configuration(hardware, setting)
        return (
            (self.systems is None or hardware.gpu.system in self.systems)
            and self.engine in (None, setting.engine)
            and self.experts in (None, experts)
            and all(getattr(own, field) == value for field, value in self.kind.items())
            and version_key(first) <= version_key(setting.release) < version_key(end)
        )


@lru_cache(maxsize=1)
def rules() -> tuple[ConstantsRule, ...]:
    """Return the rules of ``constants.json``."""
    data = json.loads(CONSTANTS_PATH.read_text(encoding="utf-8"))
    return tuple(TypeAdapter(list[ConstantsRule]).validate_python(data))


def find_constants(hardware: Hardware, setting: ExecutionSettings) -> CostConstants:
    """Return the combined constants of all rules that apply."""
    found = CostConstants()
    for rule in rules():
        if rule.fits(hardware, setting):
            found = found.joined(rule.constants)
    return found


def apply_constants(profile: CostProfile, constants: CostConstants) -> CostProfile:
    """Return ``profile`` with the constants applied."""
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
    """Return the term multiplied by the factor of the step, as one or two terms.

    There are two terms if steps with and without prefills have different factors.
    """
    if term.table is None:  # host time is not scaled as an operator
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
