"""How sure an answer is: over the chance in the workload, and over the error of the profile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from simkv.profile import Profile


@dataclass(frozen=True)
class Interval:
    """From ``low`` to ``high``, places in the order of the candidates; None is beyond the last."""

    low: int | None
    high: int | None


def spread(answers: Sequence[int | None]) -> Interval:
    """The least and the greatest of some answers; None, no candidate, is the greatest of all."""
    known = [answer for answer in answers if answer is not None]
    low = min(known, default=None)
    return Interval(low, max(known) if len(known) == len(answers) and known else None)


def coverage_of_range(repeats: int) -> float:
    """How surely the answers of independent repeats enclose the median of all answers.

    The least and the greatest of n values both lie on one side of the median of their distribution
    with the chance 2 * 2 ** -n at most, whatever it is (the interval of the sign test).
    """
    return 1.0 - 2.0 * 0.5**repeats if repeats > 1 else 0.0


def most_violated(repeats: int, confidence: float = 0.95) -> float:
    """If n of n repeats held, at most this share of all would not, with that confidence.

    The upper end of the one-sided interval of Clopper and Pearson.
    """
    return float(1.0 - (1.0 - confidence) ** (1.0 / repeats))


def error_of(profile: Profile) -> tuple[float, str] | None:
    """The relative error of a profile's steps and what it is; None if the profile states none.

    It is the largest P95 of the absolute error on steps that were not fitted to, over the kinds of
    steps: that all steps are off by as much, and to the same side, is the worst that is likely.
    """
    held_out = {kind: error for kind, error in profile.fit.held_out.items() if error.points}
    if not held_out:
        return None
    kind = max(held_out, key=lambda name: (held_out[name].p95, name))
    error = held_out[kind]
    return error.p95, f"P95 of {error.points:,} {kind} steps that were not fitted to"
