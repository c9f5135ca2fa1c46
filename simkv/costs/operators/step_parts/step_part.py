"""Part of a step before it becomes a term of a profile."""

from __future__ import annotations

from dataclasses import dataclass

from simkv.costs.cost_profile import Feature, StepFilter
from simkv.costs.operators.piecewise_curve import Curve


@dataclass(frozen=True)
class StepPart:
    """Seconds by a step feature; parts with equal name, feature and ``when`` form one term."""

    name: str
    feature: Feature
    curve: Curve
    when: StepFilter = "any"
