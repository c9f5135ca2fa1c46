"""How far off a profile may be in a run, and how much less sure it is out of its range.

A figure of a run is made of many steps. Where a profile's errors are those of single steps that
were measured on its device (basis ``measured``), they cancel out but for their bias; where they are
those of other devices or configurations, all steps are off alike. Both have the spread of runs and
hosts, and out of range what the profile was off by on ends of its data, per doubling.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import inf, log2, sqrt

from simkv.core.errors import InputError
from simkv.costs.cost_profile import CostProfile, Feature
from simkv.costs.cost_terms import compute_feature
from simkv.costs.scaled_executor import (
    ErrorSide,
    ScaledExecutor,
    StepKind,
    compute_step_scales,
)
from simkv.costs.step_load import Executor, StepLoad

#: One run on one host was measured: others differ by 2 to 4 per cent (held-back runs on the GPUs of
#: the public ones, the same settings), as a share of each step.
RUN_VARIATION = 0.03
#: More of the busy time than this outside, where nothing is known, and no interval is given: those
#: that are given claim 95 of 100 steps.
MAX_UNKNOWN_SHARE = 0.05


class OutOfRangeMargin:
    """The extra relative error of a step: 0 inside the range, and per doubling outside as much as
    the profile was off by on ends of its data that were left out (``FitQuality.beyond``). Axes that
    are left at once add up as independent errors do."""

    def __init__(self, profile: CostProfile) -> None:
        self._ends = [
            (feature, *profile.range[feature], growth)
            for feature, growth in profile.fit.beyond.items()
            if feature in profile.range and growth
        ]

    def __bool__(self) -> bool:
        return bool(self._ends)

    def __call__(self, load: StepLoad) -> float:
        squares = 0.0
        for feature, low, high, growth in self._ends:
            value = compute_feature(load, feature)
            if value and not low <= value <= high:
                squares += (growth * doublings(value, low, high)) ** 2
        return sqrt(squares)


def compute_profile_scales(profile: CostProfile, side: ErrorSide) -> dict[StepKind, float]:
    """Factors on steps in range, if all are off by what the profile knows of its error."""
    lasting = profile.basis == "measured"
    return compute_step_scales(profile.fit.held_out, side, RUN_VARIATION, lasting=lasting)


def make_scaled_executor(profile: CostProfile, side: ErrorSide) -> Callable[[Executor], Executor]:
    """Makes an executor's steps cheaper, or dearer, by what the profile knows of its error.

    Raises InputError if it knows none.
    """
    if not profile.fit.held_out:
        raise InputError(f"profile {profile.name} ({profile.basis}) knows no error of its own")
    scale, wider = compute_profile_scales(profile, side), OutOfRangeMargin(profile) or None
    return lambda inner: ScaledExecutor(inner, scale, wider)


def doublings(value: float, low: float, high: float) -> float:
    """How often a value must be halved or doubled to be in a range; infinite for an empty range."""
    if value > high:
        return log2(value / high) if high > 0 else inf
    return log2(low / value) if value < low else 0.0


def unknown_share(profile: CostProfile, outside: Mapping[Feature, float], busy: float) -> float:
    """The share of the busy time (s) ``outside`` in a feature of which no error is known there."""
    unknown = [s for feature, s in outside.items() if feature not in profile.fit.beyond]
    return max(unknown, default=0.0) / busy if busy else 0.0
