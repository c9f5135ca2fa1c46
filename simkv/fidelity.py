"""How far the seconds of a simulation can be trusted, from what its cost profile knows of itself.

A profile that was measured carries its error on steps that it was not fitted to, by kind of step.
The run is simulated twice more, with every step cheaper and dearer by as much as 95 of 100 such
steps are off, all in the same direction; what comes out is the interval of each figure. So
queueing, preemptions and starvation are in it, not only the sum of the steps. It holds inside the
range of the measurements; the share of the time outside is told beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from simkv.executors import Executor, Load
from simkv.metrics import STATISTICS, figure
from simkv.profile import Profile, StepError

Side = Literal["cheaper", "dearer"]
StepKind = Literal["decode", "prefill", "mixed"]
#: Figures that get an interval, named as in ``summary.json``.
FIGURES = (
    "makespan_s",
    "request_throughput",
    "output_throughput",
    "total_token_throughput",
    "preemptions",
    "recomputed_tokens",
    "starved",
    "longest_stall_s",
    *(f"{name}.{s}" for name in ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms") for s in STATISTICS),
)
#: A step cannot be cheaper than by this share, however wrong the profile is.
LARGEST = 0.9


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
) -> Fidelity:
    """The fidelity of a run with these ``figures`` (a summary).

    ``again`` simulates the run once more, with an executor changed by what it is given, and
    returns its summary; None where that is not wanted.
    """
    errors = profile.fit.held_out
    intervals: dict[str, tuple[float, float]] = {}
    if errors and again:
        sides: tuple[Side, ...] = ("cheaper", "dearer")
        others = [again(partial(Erring, scale=scales(errors, side))) for side in sides]
        intervals = {name: _ends(name, [figures, *others]) for name in FIGURES}
    return Fidelity(
        profile.name,
        profile.basis,
        outside,
        errors,
        intervals,
        _note(profile, outside, bool(intervals)),
    )


def scales(errors: Mapping[str, StepError], side: Side) -> dict[StepKind, float]:
    """Factors on the cost of a step by its kind: 95 of 100 real steps lie within both sides.

    An error is the predicted time over the real one, less 1. A kind of step that was not measured
    takes the error of all, or the largest that there is.
    """
    worst = max(errors.values(), key=lambda error: error.p95)
    found: dict[StepKind, float] = {}
    kinds: tuple[StepKind, ...] = ("decode", "prefill", "mixed")
    for kind in kinds:
        error = errors.get(kind) or errors.get("all") or worst
        found[kind] = (
            1.0 / (1.0 + error.p95) if side == "cheaper" else 1.0 / (1.0 - min(error.p95, LARGEST))
        )
    return found


def kind_of(load: Load) -> StepKind:
    """What a step does, from its load."""
    if not load.prefill_seqs:
        return "decode"
    return "mixed" if load.decode_seqs else "prefill"


class Erring:
    """An executor whose steps are cheaper or dearer than the one inside says, by kind of step."""

    def __init__(self, inner: Executor, scale: Mapping[StepKind, float]) -> None:
        self.inner = inner
        self._scale = scale
        self.wants_spread: bool = getattr(inner, "wants_spread", False)

    def run(self, load: Load) -> float:
        return self.inner.run(load) * self._scale[kind_of(load)]

    def foresee(self, load: Load, steps: int) -> list[float]:
        scale = self._scale["decode"]
        return [seconds * scale for seconds in self.inner.foresee(load, steps)]

    def ran(self, load: Load, seconds: Sequence[float]) -> None:
        self.inner.ran(load, seconds)

    def idle(self) -> float:
        return self.inner.idle()


def _ends(name: str, runs: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    values = [float(figure(dict(run), name)) for run in runs]
    return min(values), max(values)


def _note(profile: Profile, outside: float, computed: bool) -> str:
    errors = profile.fit.held_out
    if not errors:
        return (
            f"costs by {profile.name} ({profile.basis}): its error on steps that it was not fitted "
            f"to is not known, so no figure has an interval"
        )
    by_kind = {kind: error for kind, error in errors.items() if kind != "all"} or errors
    worst = ", ".join(f"{kind} {100 * error.p95:.1f} %" for kind, error in by_kind.items())
    said = f"costs by {profile.name} ({profile.basis}): 95 of 100 steps are off by at most {worst}"
    if computed:
        said += "; intervals are of runs with every step off by that, one way and the other"
    if outside:
        share = f"{100 * outside:.1f} % of the busy time"
        said += f"; {share} lay outside its range, where no error is known"
    return said
