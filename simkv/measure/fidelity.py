"""How far the seconds of a simulation can be trusted, from what its cost profile knows of itself.

A profile that was measured carries its error on steps that it was not fitted to, by kind of step.
The run is simulated twice more, with every step cheaper and dearer by what such steps are off by in
the mean (``costs/widening.py``), all in the same direction; what comes out is the interval of each
figure. So queueing, preemptions and starvation are in it, not only the sum of the steps. Out of
range it widens; the share of the time there is told beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from simkv.core.figures import LATENCIES, STATISTICS, figure
from simkv.costs.erring import Side
from simkv.costs.load import Executor
from simkv.costs.profile import Profile, StepError
from simkv.costs.widening import RUNS, UNKNOWN, off_by

#: Figures that get an interval, named as in ``summary.json``.
FIGURES = (
    "makespan_s",
    "request_throughput",
    "output_throughput",
    "total_token_throughput",
    "preemptions",
    "recomputed_tokens",
    "starved",
    "timed_out",
    "longest_stall_s",
    *(f"{name}.{s}" for name in LATENCIES for s in STATISTICS),
)


@dataclass(frozen=True)
class Fidelity:
    """What is known of a run's error.

    ``outside`` is the share of the busy time that lay outside the profile's range; ``errors`` are
    the profile's own, by kind of step; ``intervals`` the smallest and largest value of each figure
    (empty where the profile knows no error). ``note`` says it in a sentence.
    """

    profile: str
    basis: str
    outside: float
    errors: dict[str, StepError]
    intervals: dict[str, tuple[float, float]]
    note: str

    def to_json(self) -> dict[str, Any]:
        """As in ``summary.json``."""
        return {
            "profile": self.profile,
            "basis": self.basis,
            "outside_range_share": self.outside,
            "step_errors": {kind: error.model_dump() for kind, error in self.errors.items()},
            "intervals": {name: list(ends) for name, ends in self.intervals.items()},
            "note": self.note,
        }


def fidelity(
    profile: Profile,
    outside: float,
    figures: Mapping[str, Any],
    again: Callable[[Callable[[Executor], Executor]], Mapping[str, Any]] | None,
    unknown: float = 0.0,
) -> Fidelity:
    """The fidelity of a run with these ``figures`` (a summary).

    ``again`` simulates the run once more, with an executor changed by what it is given, and
    returns its summary; None where that is not wanted. ``unknown`` is the share of the busy time
    outside of the range in a feature of which no error is known there.
    """
    errors = profile.fit.held_out
    intervals: dict[str, tuple[float, float]] = {}
    if errors and again and unknown <= UNKNOWN:
        others = [again(changed) for changed in both_sides(profile)]
        intervals = {name: _ends(name, [figures, *others]) for name in FIGURES}
    return Fidelity(
        profile.name,
        profile.basis,
        outside,
        errors,
        intervals,
        _note(profile, outside, unknown, bool(intervals)),
    )


def both_sides(profile: Profile) -> list[Callable[[Executor], Executor]]:
    """Executors whose steps are all cheaper, and all dearer, than a profile with errors says."""
    sides: tuple[Side, ...] = ("cheaper", "dearer")
    return [off_by(profile, side) for side in sides]


def _ends(name: str, runs: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    values = [float(figure(dict(run), name)) for run in runs]
    return min(values), max(values)


def _note(profile: Profile, outside: float, unknown: float, computed: bool) -> str:
    errors = profile.fit.held_out
    if not errors:
        return (
            f"costs by {profile.name} ({profile.basis}): its error on steps that it was not fitted "
            f"to is not known, so no figure has an interval"
        )
    by_kind = {kind: error for kind, error in errors.items() if kind != "all"} or errors
    worst = ", ".join(f"{kind} {100 * error.p95:.1f} %" for kind, error in by_kind.items())
    said = f"costs by {profile.name} ({profile.basis}): 95 of 100 steps are off by at most {worst}"
    if profile.fit.note:
        said += f" ({profile.fit.note})"
    if computed:
        what = "what is left of that in their mean" if profile.basis == "measured" else "that"
        said += (
            f"; intervals are of runs with every step off by {what} and by the {100 * RUNS:g} % "
            f"that runs and hosts differ by, one way and the other"
        )
    if outside:
        said += f"; {100 * outside:.1f} % of the busy time lay outside its range"
        if unknown > UNKNOWN:
            said += f", {100 * unknown:.1f} % where no error is known: no figure has an interval"
        elif profile.fit.beyond:
            said += ", where they widen with the distance"
        else:
            said += ", where no error is known"
    return said
