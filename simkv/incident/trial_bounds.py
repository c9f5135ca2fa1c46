"""Limits of what-if trials: the simulated time, and the part of a long incident.

A trial with a setting that slows the server down would take long. The simulated time of each trial
is therefore limited to ``HORIZON_FACTOR`` times the duration of the incident. If not all requests
finished, the duration also includes the time for these requests in isolation. All trials together
may simulate about ``STEP_BUDGET`` steps. For a longer incident, the trials simulate its worst part,
and only the best changes are tried on the whole incident.
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

#: Number of steps of all trials together, and the expected number of trials.
STEP_BUDGET, EXPECTED_TRIALS = 3_000_000, 60
#: End of a trial, as a multiple of the end of the incident.
HORIZON_FACTOR = 2.0
#: Maximum number of changes that are tried on the whole incident after trials on a part of it.
FINALISTS = 8
#: Number of start positions tried in the search for the worst part of an incident.
WINDOW_POSITIONS = 64


@dataclass(frozen=True)
class Bounds:
    """Limits of what-if trials of an incident.

    Each trial ends at the simulated time ``horizon`` (s). ``part`` is the start (s) and duration
    (s) of the simulated part of a long incident, and its fraction of all waiting time, or None for
    the whole incident. ``finalists`` is the number of changes that are tried on the whole incident.
    """

    horizon: float
    part: tuple[float, float, float] | None = None
    finalists: int = FINALISTS

    def whole(self, scenario: Scenario) -> Scenario:
        """Return ``scenario``, limited for a trial on the whole incident."""
        return scenario.model_copy(update={"horizon": self.horizon})

    def tried(self, scenario: Scenario, folder: Path) -> Scenario:
        """Return ``scenario``, limited for the first trial of a change."""
        if self.part is None:
            return self.whole(scenario)
        start, duration, _ = self.part
        some = with_field(scenario, "workload.start", start, folder)
        some = with_field(some, "workload.duration", duration, folder)
        return some.model_copy(update={"horizon": self.horizon - start})

    @property
    def told(self) -> str:
        """Description of the limits in one sentence."""
        said = f"each simulation ended after {format_seconds(self.horizon)}"
        if self.part is None:
            return said
        start, duration, share = self.part
        on_all = (
            f"the best {self.finalists} on the whole incident"
            if self.finalists
            else "none on the whole incident"
        )
        return (
            f"{said}; because the incident is long, changes were simulated on a part of "
            f"{format_seconds(duration)}, from {format_seconds(start)} on, with "
            f"{100 * share:.0f} % of all waiting time, and {on_all}"
        )


def bounds(result: RunResult, waited: dict[int, float], steps: int = STEP_BUDGET) -> Bounds:
    """Return the limits for trials of a run.

    ``waited`` contains the waiting time of each request in seconds. ``steps`` is the limit on the
    total number of steps of all trials.
    """
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
