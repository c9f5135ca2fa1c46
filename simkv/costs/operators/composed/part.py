"""One summand of a step before it becomes a term of a profile."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from simkv.costs.operators.curve import Curve
from simkv.costs.profile import Feature, When

#: What a constant of a calibration may scale by itself.
Kind = Literal["products", "experts", "collectives", "other"]


@dataclass(frozen=True)
class Part:
    """Seconds by a feature of the step; parts of one name, feature and ``when`` are one term."""

    name: str
    feature: Feature
    curve: Curve
    kind: Kind = "other"
    when: When = "any"
