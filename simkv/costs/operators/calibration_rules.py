"""What a calibration may change of composed costs: a few factors and seconds for a kind of run.

``constants.json`` holds rules in order, each for some systems, an engine, a range of its releases,
the format of the experts or a kind (``error_spreads.py``), with the ``source`` of its figures;
without a rule that fits, nothing is changed. The factors of all that fit are multiplied, their
seconds added up.
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

#: Fields of a ``Kind`` that a rule may name.
KindField = Literal["backend", "family", "gpu", "model", "attention", "experts", "weights", "mlp"]
Factor = Annotated[float, Field(gt=0)]
CONSTANTS_PATH = Path(__file__).with_name("constants.json")


class CostConstants(FrozenModel):
    """Factors on times of operators, and on all of a step with prefills or without; and seconds.

    ``prefill`` and ``decode`` are of whole steps, ``prefill_step_s`` is added to a step with
    prefills, ``step_s`` to every step, ``seq_s`` for each of its sequences; ``front_s`` passes
    before the engine core has a request.
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
        """Both changes after one another."""
        mine, theirs = self.model_dump(), other.model_dump()
        return CostConstants(
            **{
                name: value + theirs[name] if name.endswith("_s") else value * theirs[name]
                for name, value in mine.items()
            }
        )


class ConstantsRule(FrozenModel):
    """Constants, and for whom: each of what is given must fit."""

    systems: list[str] | None = None
    engine: str | None = None
    releases: tuple[str, str] | None = None  # from the first, before the second
    experts: str | None = None  # a number format, or "none" for a dense model
    kind: dict[KindField, str] = Field(default={})
    constants: CostConstants
    source: str

    def fits(self, hardware: Hardware, setting: ExecutionSettings) -> bool:
        """Whether it is for these."""
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
    """The rules of ``constants.json``."""
    data = json.loads(CONSTANTS_PATH.read_text(encoding="utf-8"))
    return tuple(TypeAdapter(list[ConstantsRule]).validate_python(data))


def find_constants(hardware: Hardware, setting: ExecutionSettings) -> CostConstants:
    """What the rules change for a run; neutral where none fits."""
    found = CostConstants()
    for rule in rules():
        if rule.fits(hardware, setting):
            found = found.joined(rule.constants)
    return found
