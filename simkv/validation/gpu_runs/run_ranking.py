"""Compare all runs of a validation plan with the predictions, and check the order of paired
trials.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from simkv.validation.figure_comparison import FigureComparison
from simkv.validation.gpu_runs.baseline_models import fit_baselines
from simkv.validation.gpu_runs.comparison_levels import (
    IntervalScore,
    Validation,
    score_intervals,
    validate_run,
)
from simkv.validation.gpu_runs.load_sizing import Trial
from simkv.validation.gpu_runs.timed_replay import GpuRun, read_runs
from simkv.validation.gpu_runs.validation_plan_file import Plan
from simkv.validation.gpu_runs.validation_suite import TrialRun

#: Metrics that rank pairs of trials.
RANKED = ("makespan_s", "ttft_ms.p99", "tpot_ms.p99", "e2e_ms.mean")


@dataclass(frozen=True)
class JudgedTrial:
    """A trial, its first run, and the results of its validation over all runs."""

    trial: Trial
    run: GpuRun
    found: Validation

    @property
    def score(self) -> IntervalScore | None:
        """Score of the predicted intervals of the trial's metrics, or None without intervals."""
        return score_intervals(self.found.figures)

    def figure(self, name: str) -> FigureComparison:
        """Return the comparison of the metric ``name``."""
        return next(f for f in self.found.figures if f.name == name)


@dataclass(frozen=True)
class Ranking:
    """Measured and simulated ratio of a metric between two trials, ``case`` and ``beside``.

    ``right`` is true if both ratios are above 1 or both are below 1. ``right`` is None if the
    measured ratio differs from 1 by at most twice the noise.
    """

    case: str
    beside: str
    figure: str
    real: float
    simulated: float
    noise: float

    @property
    def right(self) -> bool | None:
        if abs(self.real - 1.0) <= 2 * self.noise:
            return None
        return (self.real > 1.0) == (self.simulated > 1.0)


def judge_trials(trials: Sequence[Trial], plan: Plan, folder: Path) -> list[JudgedTrial]:
    """Compare the predictions with all runs in ``folder/runs``. Trials without a run are
    skipped.
    """
    judged = []
    baselines = {
        name: fit_baselines(plan.training.get(name, []), profile)
        for name, profile in plan.profiles.items()
    }
    for trial in trials:
        runs: list[GpuRun] = []
        while (path := folder / "runs" / TrialRun(trial, len(runs) + 1).name).exists():
            runs.append(read_runs(path)["run"])
        if runs:
            profile, models = plan.profiles[trial.profile], baselines[trial.profile]
            found = validate_run(runs[0], profile, runs[1:], models)
            judged.append(JudgedTrial(trial, runs[0], found))
    return judged


def rankings(judged: Sequence[JudgedTrial]) -> list[Ranking]:
    """Return a comparison of each trial with its paired trial, for each metric in ``RANKED``."""
    by_name = {one.trial.name: one for one in judged}
    found = []
    for one in judged:
        other = by_name.get(one.trial.beside or "")
        if other is None:
            continue
        for name in RANKED:
            a, b = one.figure(name), other.figure(name)
            if a.real and b.real and b.predicted:
                known = [noise for j in judged if (noise := j.figure(name).noise) is not None]
                found.append(
                    Ranking(
                        one.trial.name,
                        other.trial.name,
                        name,
                        a.real / b.real,
                        a.predicted / b.predicted,
                        max(known, default=0.0),
                    )
                )
    return found
