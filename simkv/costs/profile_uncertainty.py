"""Uncertainty of a profile over a whole run, and its growth outside the profile's range.

The sources of error (``ErrorSource``) are independent, so the squares of their interval ends are
added. A metric of a run depends on many steps. Errors measured on the same device (basis
``measured``) cancel out except for their bias. Errors from other devices or configurations are
assumed to be equal for all steps. Outside the range, an error is added for each doubling of a
feature.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import exp, hypot, inf, log2, sqrt

from simkv.core.errors import InputError
from simkv.costs.cost_profile import CostProfile, ErrorSource, Feature, StepError
from simkv.costs.cost_terms import compute_feature
from simkv.costs.scaled_executor import (
    ErrorSide,
    ScaledExecutor,
    StepKind,
    error_end,
)
from simkv.costs.step_load import Executor, StepLoad

#: Kinds of steps with an error of their own.
STEP_KINDS: tuple[StepKind, ...] = ("decode", "prefill", "mixed")
#: Relative variation of step times between runs and hosts, which a profile from one run on one host
#: does not show. Repeated runs on the same GPUs with the same settings differ by 2 to 4 %.
RUN_VARIATION = 0.03
#: Maximum fraction of busy time in steps outside the range without a known error. Above this
#: fraction, simkv reports no interval, because an interval should cover 95 of 100 steps.
MAX_UNKNOWN_SHARE = 0.05


class OutOfRangeMargin:
    """Additional relative error of a step outside the range of its profile.

    The error grows by ``FitQuality.beyond`` with each doubling of a feature.
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


def error_ends(
    errors: Mapping[str, StepError], runs: float = 0.0, *, lasting: bool = False
) -> dict[str, tuple[float, float]]:
    """Return an interval of log(real / predicted) for each kind of step.

    The interval contains 95 % of the real steps. With ``lasting``, it contains the mean over many
    steps instead. ``runs`` is the relative variation between runs and hosts.
    """
    worst = max(errors.values(), key=lambda error: error.p95)
    found: dict[str, tuple[float, float]] = {}
    for kind in STEP_KINDS:
        error = errors.get(kind) or errors.get("all") or worst
        size = hypot(error.lasting if lasting else error.p95, runs)
        found[kind] = (error_end(size, "faster"), error_end(size, "slower"))
    return found


def combine_ends(ends: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """Combine the intervals of independent sources of error.

    Each end is the root of the sum of the squared ends.
    """
    lows, highs = zip(*ends, strict=True)
    return -hypot(*lows), hypot(*highs)


def find_sources(profile: CostProfile) -> list[ErrorSource]:
    """Return the sources of error of a profile; empty if no error is known."""
    if profile.fit.sources or not profile.fit.held_out:
        return profile.fit.sources
    lasting = profile.basis == "measured"
    ends = error_ends(profile.fit.held_out, RUN_VARIATION, lasting=lasting)
    return [ErrorSource(name="costs", ends=ends)]


def compute_scales(sources: Sequence[ErrorSource], side: ErrorSide) -> dict[StepKind, float]:
    """Return the factor for step times at one end of the interval, for each kind of step."""
    index = 0 if side == "faster" else 1
    return {
        kind: exp(combine_ends([source.ends[kind] for source in sources])[index])
        for kind in STEP_KINDS
    }


def compute_profile_scales(profile: CostProfile, side: ErrorSide) -> dict[StepKind, float]:
    """Return the factor for step times at one end of the profile's error, for each kind of step.

    ``side`` selects faster or slower steps.
    """
    return compute_scales(find_sources(profile), side)


def make_scaled_executor(profile: CostProfile, side: ErrorSide) -> Callable[[Executor], Executor]:
    """Return a function that scales the step times of an executor by the profile's error.

    ``side`` selects faster or slower steps. Raises InputError if the profile has no error estimate.
    """
    if not profile.fit.held_out:
        raise InputError(
            f"the error of the step times is unknown for profile {profile.name} ({profile.basis})"
        )
    scale, wider = compute_profile_scales(profile, side), OutOfRangeMargin(profile) or None
    return lambda inner: ScaledExecutor(inner, scale, wider)


def doublings(value: float, low: float, high: float) -> float:
    """Return the number of doublings or halvings from the nearest end of the range to ``value``.

    The number is 0 inside the range, and infinite above a range that ends at 0.
    """
    if value > high:
        return log2(value / high) if high > 0 else inf
    return log2(low / value) if value < low else 0.0


def unknown_share(profile: CostProfile, outside: Mapping[Feature, float], busy: float) -> float:
    """Return the fraction of busy time in steps whose error is unknown.

    ``outside`` contains the seconds in steps outside the profile's range, by feature. ``busy`` is
    in seconds.
    """
    unknown = [s for feature, s in outside.items() if feature not in profile.fit.beyond]
    return max(unknown, default=0.0) / busy if busy else 0.0
