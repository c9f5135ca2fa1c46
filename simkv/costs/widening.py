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
from simkv.costs.erring import Erring, Side, StepKind, scales
from simkv.costs.load import Executor, Load
from simkv.costs.pricing import feature_of
from simkv.costs.profile import Feature, Profile

#: One run on one host was measured: others differ by 2 to 4 per cent (held-back runs on the GPUs of
#: the public ones, the same settings), as a share of each step.
RUNS = 0.03
#: More of the busy time than this outside, where nothing is known, and no interval is given: those
#: that are given claim 95 of 100 steps.
UNKNOWN = 0.05


class Widening:
    """The extra relative error of a step: 0 inside the range, and per doubling outside as much as
    the profile was off by on ends of its data that were left out (``Fit.beyond``). Axes that are
    left at once add up as independent errors do."""

    def __init__(self, profile: Profile) -> None:
        self._ends = [
            (feature, *profile.range[feature], growth)
            for feature, growth in profile.fit.beyond.items()
            if feature in profile.range and growth
        ]

    def __bool__(self) -> bool:
        return bool(self._ends)

    def __call__(self, load: Load) -> float:
        squares = 0.0
        for feature, low, high, growth in self._ends:
            value = feature_of(load, feature)
            if value and not low <= value <= high:
                squares += (growth * doublings(value, low, high)) ** 2
        return sqrt(squares)


def scales_of(profile: Profile, side: Side) -> dict[StepKind, float]:
    """Factors on steps in range, if all are off by what the profile knows of its error."""
    lasting = profile.basis == "measured"
    return scales(profile.fit.held_out, side, RUNS, lasting=lasting)


def off_by(profile: Profile, side: Side) -> Callable[[Executor], Executor]:
    """Makes an executor's steps cheaper, or dearer, by what the profile knows of its error.

    Raises InputError if it knows none.
    """
    if not profile.fit.held_out:
        raise InputError(f"profile {profile.name} ({profile.basis}) knows no error of its own")
    scale, wider = scales_of(profile, side), Widening(profile) or None
    return lambda inner: Erring(inner, scale, wider)


def doublings(value: float, low: float, high: float) -> float:
    """How often a value must be halved or doubled to be in a range; infinite for an empty range."""
    if value > high:
        return log2(value / high) if high > 0 else inf
    return log2(low / value) if value < low else 0.0


def unknown_share(profile: Profile, outside: Mapping[Feature, float], busy: float) -> float:
    """The share of the busy time (s) ``outside`` in a feature of which no error is known there."""
    unknown = [s for feature, s in outside.items() if feature not in profile.fit.beyond]
    return max(unknown, default=0.0) / busy if busy else 0.0
