"""One summand of a step before it becomes a term of a profile."""

from __future__ import annotations

from dataclasses import dataclass

from simkv.costs.cost_profile import Feature, StepFilter
from simkv.costs.operators.piecewise_curve import Curve


@dataclass(frozen=True)
class StepPart:
    """Seconds by a feature of the step; parts of one name, feature and ``when`` are one term."""

    name: str
    feature: Feature
    curve: Curve
    when: StepFilter = "any"
