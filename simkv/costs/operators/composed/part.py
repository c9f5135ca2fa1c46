"""One summand of a step before it becomes a term of a profile."""

from __future__ import annotations

from dataclasses import dataclass

from simkv.costs.operators.curve import Curve
from simkv.costs.profile import Feature, When


@dataclass(frozen=True)
class Part:
    """Seconds by a feature of the step; parts of one name, feature and ``when`` are one term."""

    name: str
    feature: Feature
    curve: Curve
    when: When = "any"
