"""Calibration of composed costs: factors and additional seconds for some configurations.

``constants.json`` lists rules. A rule applies to some GPU systems, an engine, a range of its
releases, a number format of the experts or another property of a ``Configuration``
(``error_spreads.py``), and states the ``source`` of its values. The factors of all rules that apply
are multiplied and their seconds are added. If no rule applies, costs are unchanged.
"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from simkv.costs.frozen_model import FrozenModel
from simkv.costs.hardware.execution_settings_lookup import ExecutionSettings
from simkv.costs.hardware.replica_hardware import Hardware
from simkv.costs.operators.error_spreads import classify_configuration
from simkv.costs.operators.operator_tables import version_key

#: Fields of a ``Configuration`` that may be conditions of a rule.
KindField = Literal["backend", "family", "gpu", "model", "attention", "experts", "weights", "mlp"]
Factor = Annotated[float, Field(gt=0)]
CONSTANTS_PATH = Path(__file__).with_name("constants.json")


class CostConstants(FrozenModel):
    """Factors for operator times and for whole steps, and additional seconds.

    ``prefill`` and ``decode`` scale whole steps with and without prefills. ``prefill_step_s`` is
    added to a step with prefills, ``step_s`` to every step, and ``seq_s`` to a step for each of its
    sequences. ``front_s`` is the time until the engine core receives a request.
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
        """Return the combination of both: factors are multiplied and seconds are added."""
        mine, theirs = self.model_dump(), other.model_dump()
        return CostConstants(
            **{
                name: value + theirs[name] if name.endswith("_s") else value * theirs[name]
                for name, value in mine.items()
            }
        )


class ConstantsRule(FrozenModel):
    """Constants of a calibration, and the conditions under which they apply.

    A rule applies if all of its conditions hold; None is no condition. ``source`` states where the
    constants come from.
    """

    systems: list[str] | None = None
    engine: str | None = None
    releases: tuple[str, str] | None = None  # from the first, before the second
    experts: str | None = None  # a number format, or "none" for a dense model
    kind: dict[KindField, str] = Field(default={})
    constants: CostConstants
    source: str

    def fits(self, hardware: Hardware, setting: ExecutionSettings) -> bool:
        """Return whether the rule applies to this hardware and these engine settings."""
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
    """Return the combined constants of all rules that apply; they change nothing if no rule
    does.
    """
    found = CostConstants()
    for rule in rules():
        if rule.fits(hardware, setting):
            found = found.joined(rule.constants)
    return found
