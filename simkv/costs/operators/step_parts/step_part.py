"""A part of the step time, which ``compose`` turns into a term of a cost profile."""

from __future__ import annotations

from dataclasses import dataclass

from simkv.costs.cost_profile import Feature, StepFilter
from simkv.costs.operators.piecewise_curve import Curve


@dataclass(frozen=True)
class StepPart:
    """Time in seconds as a function (``curve``) of a step feature, for the steps that ``when``
    selects.

    Parts with equal name, feature and ``when`` are added to form one term.
    """

    name: str
    feature: Feature
    curve: Curve
    when: StepFilter = "any"
