"""How far what-if goes: every trial has an end, and a long incident is tried on its worst part.

A trial of a setting that makes a server crawl would take the longer to simulate the less it is
worth. So each ends ``HORIZON_FACTOR`` times as late as the incident did; where that did not serve
all, after as long as its requests would take one by one. All trials together go through about
``STEP_BUDGET`` steps: if the incident is too long for that, they have its worst part, and the best
of them all of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from simkv.core.figure_registry import format_seconds
from simkv.core.outcome import Outcome
from simkv.metrics.run_result import RunResult
from simkv.scenario.scenario import Scenario
from simkv.study.field_changes import with_field

#: Steps of all trials together, and how many trials there are about.
STEP_BUDGET, EXPECTED_TRIALS = 3_000_000, 60
#: A trial ends so many times as late as the incident.
HORIZON_FACTOR = 2.0
#: Trials on the whole of an incident that the others had a part of, at most.
FINALISTS = 8
#: Places at which the worst part of an incident is looked for.
WINDOW_POSITIONS = 64


@dataclass(frozen=True)
class Bounds:
    """When trials of an incident end (``horizon``, s), and which part of it they have: ``start``
    and ``duration`` (s) of its arrivals and how much of all waiting that part has; None is all.
    ``finalists`` have all of it."""

    horizon: float
    part: tuple[float, float, float] | None = None
    finalists: int = FINALISTS

    def whole(self, scenario: Scenario) -> Scenario:
        """The incident as it is tried on all of it."""
        return scenario.model_copy(update={"horizon": self.horizon})

    def tried(self, scenario: Scenario, folder: Path) -> Scenario:
        """The incident as every change is tried on it."""
        if self.part is None:
            return self.whole(scenario)
        start, duration, _ = self.part
        some = with_field(scenario, "workload.start", start, folder)
        some = with_field(some, "workload.duration", duration, folder)
        return some.model_copy(update={"horizon": self.horizon - start})

    @property
    def told(self) -> str:
        """What was cut off, in a sentence."""
        said = f"trials ended after {format_seconds(self.horizon)}"
        if self.part is None:
            return said
        start, duration, share = self.part
        on_all = (
            f"the best {self.finalists} on all of it" if self.finalists else "none on all of it"
        )
        return (
            f"{said}; the incident is long, so changes were tried on the "
            f"{format_seconds(duration)} from "
            f"{format_seconds(start)} on, which have {100 * share:.0f} % of all waiting, and "
            f"{on_all}"
        )


def bounds(result: RunResult, waited: dict[int, float], steps: int = STEP_BUDGET) -> Bounds:
    """Where trials of a run end. ``waited`` are seconds that each request waited."""
    record = result.record
    lives = record.requests.values()
    end = max([record.end, *(life.ended_at or 0.0 for life in lives)])
    if any(life.outcome is not Outcome.FINISHED for life in lives):
        last = max(life.request.arrival for life in lives)
        end = max(end, last + sum(record.isolated_s.values()))
    horizon, taken = HORIZON_FACTOR * end, len(record.steps)
    share = steps / EXPECTED_TRIALS / max(taken, 1)
    if share >= 1:
        return Bounds(horizon)
    arrivals = np.array([life.request.arrival for life in lives])
    lost = np.array([waited.get(life.request.id, 0.0) for life in lives])
    span = float(arrivals.max())
    duration = max(share * span, 1e-3)
    starts = np.linspace(0.0, max(span - duration, 0.0), WINDOW_POSITIONS)
    sums = [float(lost[(arrivals >= a) & (arrivals < a + duration)].sum()) for a in starts]
    worst = int(np.argmax(sums))
    finalists = min(FINALISTS, steps // taken)
    part = (float(starts[worst]), duration, sums[worst] / (float(lost.sum()) or 1.0))
    return Bounds(horizon, part, finalists)
