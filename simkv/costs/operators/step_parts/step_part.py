"""Contribution to the step time, before it becomes a term of a cost profile."""

from __future__ import annotations

from dataclasses import dataclass

from simkv.costs.cost_profile import Feature, StepFilter
from simkv.costs.operators.piecewise_curve import Curve


@dataclass(frozen=True)
class StepPart:
    """Seconds as a function (``curve``) of a step feature, in steps selected by ``when``.

    Contributions with equal name, feature and ``when`` are added to one term.
    """

    name: str
    feature: Feature
    curve: Curve
    when: StepFilter = "any"
