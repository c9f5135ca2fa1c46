"""Uncertainty of a profile over a whole run, and its growth outside the profile's range.

A metric of a run depends on many steps. If the errors were measured on single steps on the same
device (basis ``measured``), they cancel out over many steps except for their bias. If the errors
come from other devices or configurations, they do not cancel out: all steps may have the same
error. Variation between runs and hosts is added in each case. Outside the range, an error per
doubling is added, which was measured by extrapolating to excluded data at the ends of the range.
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

#: Relative variation of step times between runs and hosts, which a profile from one run on one host
#: does not show. Repeated runs on the same GPUs with the same settings differ by 2 to 4 %.
RUN_VARIATION = 0.03
#: Maximum fraction of busy time in steps outside the range without a known error. Above this
#: fraction, simkv reports no interval, because an interval should cover 95 of 100 steps.
MAX_UNKNOWN_SHARE = 0.05


class OutOfRangeMargin:
    """Additional relative error of a step outside the range of its profile.

    The error is 0 inside the range. Outside, it grows with each doubling of a feature by
    ``FitQuality.beyond``. If several features are outside, their errors add up as independent
    errors.
    """

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
    """Return the factor on step times, by kind of step, for one ``side`` of the profile's error
    (faster or slower).

    The factors apply to steps within the range of the profile.
    """
    lasting = profile.basis == "measured"
    return compute_step_scales(profile.fit.held_out, side, RUN_VARIATION, lasting=lasting)


def make_scaled_executor(profile: CostProfile, side: ErrorSide) -> Callable[[Executor], Executor]:
    """Return a function that wraps an executor and scales its steps by the profile's error.

    ``side`` selects whether steps become faster or slower. Raises InputError if the profile has no
    error estimate.
    """
    if not profile.fit.held_out:
        raise InputError(
            f"profile {profile.name} ({profile.basis}) has no error estimate of step times"
        )
    scale, wider = compute_profile_scales(profile, side), OutOfRangeMargin(profile) or None
    return lambda inner: ScaledExecutor(inner, scale, wider)


def doublings(value: float, low: float, high: float) -> float:
    """Return the number of doublings between ``value`` and the nearest end of the range.

    The result is 0 inside the range; above a range that ends at 0, it is infinite.
    """
    if value > high:
        return log2(value / high) if high > 0 else inf
    return log2(low / value) if value < low else 0.0


def unknown_share(profile: CostProfile, outside: Mapping[Feature, float], busy: float) -> float:
    """Return the fraction of busy time in steps that are outside the range in features without a
    known error.

    ``outside`` maps a feature to the seconds outside its range; ``busy`` is in seconds.
    """
    unknown = [s for feature, s in outside.items() if feature not in profile.fit.beyond]
    return max(unknown, default=0.0) / busy if busy else 0.0
