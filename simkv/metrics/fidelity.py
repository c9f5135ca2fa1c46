"""Intervals of a run's metrics, from the known errors of its cost profile.

A fitted profile contains its error on held-out steps, for each kind of step. The run is simulated
twice more: with every step faster by the error of its kind, and with every step slower
(``costs/profile_uncertainty.py``). The results give the interval of each metric
(``metrics/intervals.py``). The intervals are wider if steps are outside the range of the profile's
data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from simkv.costs.cost_profile import CostProfile, ErrorSource, StepError
from simkv.costs.profile_uncertainty import (
    MAX_UNKNOWN_SHARE,
    RUN_VARIATION,
    find_sources,
    make_scaled_executor,
)
from simkv.costs.scaled_executor import ErrorSide
from simkv.costs.step_load import Executor
from simkv.metrics.intervals import (
    INTERVAL_FIGURES,
    FigureInterval,
    MeasuredRun,
    compute_interval,
    find_saturation,
)

#: Names of the run and its re-runs in the reasons for unbounded intervals.
RUN = "in the run"
RERUNS: dict[ErrorSide, str] = {"faster": "with faster steps", "slower": "with slower steps"}

#: Labels of the origin of step times (the basis of the cost profile) in a table; other origins are
#: printed as they are.
_SHORT_BASES = {
    "composed of measured operators": "composed",
    "estimated from the data sheet": "data sheet",
    "fitted to published figures": "fitted",
}


def find_step_errors(errors: Mapping[str, StepError]) -> tuple[float, float] | None:
    """Return the largest median and the largest P95 of the errors of all kinds of steps.

    The values are fractions: 0.01 is 1 %. The result is None if no error is known.
    """
    if not errors:
        return None
    found = errors.values()
    return max(error.median for error in found), max(error.p95 for error in found)


def mark_step_times(basis: str, errors: Mapping[str, StepError]) -> str:
    """Return a label with the origin and the typical error of step times, such as ``composed ±11
    %``.
    """
    found = find_step_errors(errors)
    short = _SHORT_BASES.get(basis, basis)
    return f"{short}, error unknown" if found is None else f"{short} ±{100 * found[0]:.2g} %"


def warn_mixed_bases(marks: Iterable[str]) -> list[str]:
    """Return a warning if the runs use step times of different origins, else an empty list.

    ``marks`` contains the label of each run from ``mark_step_times``.
    """
    bases = sorted({mark.partition(" ±")[0].partition(",")[0] for mark in marks})
    if len(bases) < 2:
        return []
    return [
        f"Step times have different bases ({', '.join(bases)}): a difference smaller than their "
        "errors is not significant."
    ]


@dataclass(frozen=True)
class Fidelity:
    """Known errors of a run's metrics.

    ``outside`` is the fraction of busy time in steps outside the range of the profile's data.
    ``errors`` contains the error of step durations by kind of step. ``intervals`` contains the
    interval of each metric, and is empty if the errors are unknown. ``reasons`` says why intervals
    have no upper bound. ``saturated`` contains the latencies whose upper bound depends on the
    length of the run, because a queue grows. ``note`` summarizes the errors in a sentence.
    """

    profile: str
    basis: str
    outside: float
    errors: dict[str, StepError]
    intervals: dict[str, FigureInterval]
    note: str
    reasons: dict[str, str] = field(default_factory=dict)
    saturated: dict[str, str] = field(default_factory=dict)
    sources: tuple[ErrorSource, ...] = ()

    def of(self, name: str, show: Callable[[float], str]) -> str:
        """Return the interval of the metric ``name`` as text, or "" if the metric has no interval.

        ``show`` formats the values.
        """
        found = self.intervals.get(name)
        reason = self.reasons.get(name) or self.saturated.get(name, "")
        return "" if found is None else found.text(show, reason)

    def to_json(self) -> dict[str, Any]:
        """Return the entry ``fidelity`` of ``summary.json``."""
        return {
            "profile": self.profile,
            "basis": self.basis,
            "outside_range_share": self.outside,
            "step_errors": {kind: error.model_dump() for kind, error in self.errors.items()},
            "intervals": {name: list(ends) for name, ends in self.intervals.items()},
            "not_bounded": self.reasons,
            "saturated": self.saturated,
            "error_sources": {source.name: source.ends for source in self.sources},
            "note": self.note,
        }


def estimate_fidelity(
    profile: CostProfile,
    outside: float,
    run: MeasuredRun,
    again: Callable[[str, Callable[[Executor], Executor]], MeasuredRun] | None,
    unknown: float = 0.0,
) -> Fidelity:
    """Return the known step-time errors of a run, and the resulting intervals of its metrics.

    ``outside`` is the fraction of busy time in steps outside the range of the profile's data.
    ``unknown`` is the fraction of busy time in steps with an unknown error. ``again`` simulates the
    run again, given a name and a function that changes the executor. Without ``again``, no
    intervals are computed.
    """
    errors = profile.fit.held_out
    intervals: dict[str, FigureInterval] = {}
    reasons: dict[str, str] = {}
    saturated: dict[str, str] = {}
    if errors and again and unknown <= MAX_UNKNOWN_SHARE:
        faster, slower = map(again, RERUNS.values(), scaled_executors(profile))
        for name in INTERVAL_FIGURES:
            intervals[name], reason = compute_interval(name, [faster, run, slower])
            if reason:
                reasons[name] = reason
            if grown := find_saturation(name, [run, slower]):
                saturated[name] = grown
    return Fidelity(
        profile.name,
        profile.basis,
        outside,
        errors,
        intervals,
        _note(profile, outside, unknown, bool(intervals)),
        reasons,
        saturated,
        tuple(find_sources(profile)),
    )


def scaled_executors(profile: CostProfile) -> list[Callable[[Executor], Executor]]:
    """Return two functions that wrap an executor: one for faster steps, one for slower steps.

    The step times change by the error of the profile.
    """
    return [make_scaled_executor(profile, side) for side in RERUNS]


def _note(profile: CostProfile, outside: float, unknown: float, computed: bool) -> str:
    errors = profile.fit.held_out
    if not errors:
        return (
            f"step times from profile {profile.name} ({profile.basis}); the error on held-out "
            "steps is unknown, so no metric has an interval"
        )
    by_kind = {kind: error for kind, error in errors.items() if kind != "all"} or errors
    worst = ", ".join(f"{kind} {100 * error.p95:.1f} %" for kind, error in by_kind.items())
    said = (
        f"step times from profile {profile.name} ({profile.basis}); maximum error of 95 % of "
        f"steps: {worst}"
    )
    if profile.fit.note:
        said += f" ({profile.fit.note})"
    if computed and profile.fit.sources:
        said += "; intervals are from re-runs with all step times scaled by these errors together"
    elif computed:
        scale = "mean error" if profile.basis == "measured" else "error"
        said += (
            f"; intervals are from re-runs with all step times scaled by ± ({scale} + "
            f"{100 * RUN_VARIATION:g} % variation between runs and hosts)"
        )
    if outside:
        said += f"; {100 * outside:.1f} % of the busy time was outside the profile's range"
        if unknown > MAX_UNKNOWN_SHARE:
            said += (
                f", including {100 * unknown:.1f} % where the error is unknown, so no metric "
                "has an interval"
            )
        elif profile.fit.beyond:
            said += ", where intervals widen with the distance from the range"
        else:
            said += ", where the error is unknown"
    return said
