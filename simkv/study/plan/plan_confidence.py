"""Uncertainty of a plan's answer, from the random workload and the error of the profile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from simkv.costs.cost_profile import CostProfile, ErrorSource, StepError
from simkv.costs.profile_uncertainty import (
    RUN_VARIATION,
    compute_profile_scales,
    compute_scales,
    error_ends,
)
from simkv.costs.scaled_executor import ErrorSide, StepKind
from simkv.metrics.fidelity import mark_step_times


@dataclass(frozen=True)
class AnswerRange:
    """Range of the answers of several plans, from ``low`` to ``high``.

    An answer is the index of a candidate, or None if no candidate is sufficient.
    """

    low: int | None
    high: int | None


def find_answer_range(answers: Sequence[int | None]) -> AnswerRange:
    """Return the range of some answers (see ``AnswerRange``)."""
    known = [answer for answer in answers if answer is not None]
    low = min(known, default=None)
    return AnswerRange(low, max(known) if len(known) == len(answers) and known else None)


def coverage_of_range(repeats: int) -> float:
    """Return a lower bound on the probability that n answers enclose the median of their
    distribution.

    The answers must be independent. All n answers are on one side of the median with a probability
    of at most 2**(1-n) (sign test).
    """
    return 1.0 - 2.0 * 0.5**repeats if repeats > 1 else 0.0


def bound_violated_share(repeats: int, confidence: float = 0.95) -> float:
    """Return an upper bound on the fraction of seeds that violate an objective.

    ``repeats`` is the number of simulated seeds. All of them met the objective. The bound is the
    upper end of the one-sided Clopper-Pearson interval.
    """
    return float(1.0 - (1.0 - confidence) ** (1.0 / repeats))


@dataclass(frozen=True)
class ProfileError:
    """Error of a profile's step durations.

    ``factors`` contains the factors for ``faster`` and ``slower`` steps, by kind of step. ``note``
    is the source of the factors. ``own`` is true if the profile states its error, and false if the
    user gave it. ``mark`` is a label with the origin of the step times and their typical error,
    such as ``composed ±11 %``.
    """

    factors: dict[ErrorSide, dict[StepKind, float]]
    note: str
    own: bool = False
    mark: str = ""


def find_profile_error(profile: CostProfile, given: float | None) -> ProfileError:
    """Return the relative error ``given`` by the user, or the error that the profile states."""
    sides: tuple[ErrorSide, ...] = ("faster", "slower")
    if given is not None:
        one = StepError(points=0, median=given, p95=given, bias=0.0)
        source = ErrorSource(name="given", ends=error_ends({"all": one}))
        factors = {side: compute_scales([source], side) for side in sides} if given else {}
        note = f"error of {100 * given:g} % per step, as specified"
        return ProfileError(factors, note, mark=mark_step_times(profile.basis, {"all": one}))
    errors = profile.fit.held_out
    mark = mark_step_times(profile.basis, errors)
    if not errors:
        note = f"the error of profile {profile.name} ({profile.basis}) is unknown"
        return ProfileError({}, note, mark=mark)
    known = ", ".join(f"{kind} {100 * error.p95:.1f} %" for kind, error in errors.items())
    factors = {side: compute_profile_scales(profile, side) for side in sides}
    scope = "averaged over steps" if profile.basis == "measured" else "equal for all steps"
    return ProfileError(
        factors,
        f"{mark} typically; the error is at most {known} for 95 % of steps ({scope}), plus "
        f"{100 * RUN_VARIATION:g} % between runs and hosts; it is larger outside the calibrated "
        "range",
        own=True,
        mark=mark,
    )
