"""Evaluate candidates on trials, and rank them relative to the shipped scheduler.

The shipped scheduler is the engine's scheduler without any change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import mean
from typing import Any

from simkv.core.errors import InputError
from simkv.scenario.objectives import UNSERVED_FIGURES, compute_objective_figures
from simkv.scenario.scenario import Scenario
from simkv.study.evolve.fitness import NO_FIGURE, FigureGoal, has_outcome_goal
from simkv.study.evolve.trial_split import TrialScenario
from simkv.study.field_changes import with_field
from simkv.study.job_runner import JobRunner
from simkv.study.simulation_job import RunsFailed, SimulationJob, make_job

#: Loss per fraction of unserved requests: an increase by 0.1 counts like a loss of 1.
UNSERVED_WEIGHT = 10.0
#: Loss for each part of a candidate; a part is, for example, a term of a policy.
PART_PENALTY = 0.0005
#: A candidate advances to the next round if fewer than this number of candidates beat it.
HEAT_SURVIVORS = 10


@dataclass(frozen=True)
class Candidate:
    """A candidate scheduler: the scenario fields that it changes, with their values.

    ``parts`` is its length, for example the number of terms of a policy.
    """

    change: tuple[tuple[str, Any], ...] = ()
    parts: int = 0

    @property
    def key(self) -> str:
        """Text that identifies the candidate."""
        return repr(self.change)

    def apply_to(self, trial: TrialScenario) -> Scenario:
        """Return the trial's scenario with the candidate's changes.

        Raises InputError if the changed scenario is invalid.
        """
        found = trial.scenario
        for path, value in self.change:
            found = with_field(found, path, value, trial.folder)
        return found


#: The shipped scheduler: no changes.
SHIPPED = Candidate()


@dataclass(frozen=True)
class CandidateScore:
    """Losses of a candidate relative to the engine's scheduler.

    A loss is the fraction by which a metric is worse than with the engine's scheduler. ``losses``
    has a row per trial and a column per goal. ``left_out`` is the increase of the fraction of
    unserved requests in each trial. ``trials`` is the number of all trials, also those that were
    not run. ``why`` is the reason if the candidate could not be run.
    """

    candidate: Candidate
    losses: tuple[tuple[float, ...], ...]
    left_out: tuple[float, ...]
    trials: int
    values: tuple[Mapping[str, float | None], ...] = ()
    why: str = ""
    has_outcome_goal: bool = False

    @cached_property
    def loss(self) -> tuple[float, ...]:
        """Mean loss over the trials, for each goal."""
        return tuple(sum(some) / self.trials for some in zip(*self.losses, strict=True))

    @cached_property
    def unserved(self) -> float:
        """Mean increase in the fraction of unserved requests, over all trials."""
        return sum(self.left_out) / self.trials

    @cached_property
    def fitness(self) -> tuple[float, ...]:
        """Loss for each goal, plus penalties for unserved requests and for the candidate's length.

        Lower is better.
        """
        more = PART_PENALTY * self.candidate.parts + (
            0.0 if self.has_outcome_goal else UNSERVED_WEIGHT * self.unserved
        )
        return tuple(loss + more for loss in self.loss)

    def truncate(self, trials: int) -> CandidateScore:
        """Return the score with the results of the first ``trials`` trials only."""
        return replace(self, losses=self.losses[:trials], left_out=self.left_out[:trials])

    @property
    def improves(self) -> bool:
        """Whether a goal improves, or more requests are served than with the engine's scheduler."""
        return not self.why and (self.unserved < 0 or any(loss < 0 for loss in self.loss))

    @property
    def score(self) -> float:
        """Mean of the fitness over the goals. Lower is better."""
        return sum(self.fitness) / len(self.fitness)


@dataclass
class Tournament:
    """Evaluation of candidates on trials. ``standings`` contains their scores in order of
    evaluation.

    ``trials`` begins with one trial of each scenario.
    """

    trials: Sequence[TrialScenario]
    goals: Sequence[FigureGoal]
    limits: Mapping[str, float]
    runner: JobRunner
    endings: bool = False
    scenarios: int = 1
    standings: dict[str, CandidateScore] = field(default_factory=dict)

    def job(self, candidate: Candidate, trial: TrialScenario) -> SimulationJob:
        """Return the job that runs a candidate in a trial.

        Raises InputError if the trial does not allow the candidate's changes.
        """
        return make_job(candidate.apply_to(trial), trial.folder, self.limits, endings=self.endings)

    def summaries(
        self, candidates: Sequence[Candidate], trials: Sequence[TrialScenario]
    ) -> list[list[dict[str, Any]] | str]:
        """Return one entry per candidate: the summaries of its trials, or an error message if a
        trial fails.
        """
        jobs: list[list[SimulationJob] | str] = []
        for candidate in candidates:
            try:
                jobs.append([self.job(candidate, trial) for trial in trials])
            except InputError as error:
                jobs.append(str(error))
        failed = self.runner.run(
            [job for some in jobs if not isinstance(some, str) for job in some]
        )
        found: list[list[dict[str, Any]] | str] = []
        for some in jobs:
            if isinstance(some, str):
                found.append(some)
            elif broken := [failed[job.digest] for job in some if job.digest in failed]:
                found.append(str(broken[0]))
            else:
                found.append([self.runner.done[job.digest] for job in some])
        return found

    def start(self) -> CandidateScore:
        """Evaluate the engine's scheduler, the reference for all candidates.

        Raises RunsFailed if the engine's scheduler cannot be run.
        """
        (found,) = self.summaries([SHIPPED], self.trials)
        if isinstance(found, str):
            raise RunsFailed(
                f"the engine's own scheduling policy, which is the baseline, cannot be run: {found}"
            )
        every = len(self.trials)
        nothing = ((0.0,) * len(self.goals),) * every
        values = tuple(map(_figures, found))
        self.standings[SHIPPED.key] = CandidateScore(
            SHIPPED, nothing, (0.0,) * every, every, values
        )
        return self.standings[SHIPPED.key]

    def add(
        self, candidates: Sequence[Candidate], *, thorough: bool = False
    ) -> list[CandidateScore]:
        """Evaluate candidates and return their scores.

        Bad candidates are dropped after the first trials, unless ``thorough`` is true.
        """
        left = list({one.key: one for one in candidates if one.key not in self.standings}.values())
        every = len(self.trials)
        for heat in sorted({every} if thorough else {1, self.scenarios, every}):
            ran = self._try(left, self.trials[:heat])
            self.standings.update({one.candidate.key: one for one in ran})
            left = [one.candidate for one in ran if one.improves and self._stays(one, heat)]
        return [self.standings[one.key] for one in candidates]

    def _stays(self, one: CandidateScore, heat: int) -> bool:
        so_far = [other.truncate(heat) for other in self.standings.values()]
        return (
            sum(_beats(other, one) for other in so_far if len(other.losses) == heat)
            < HEAT_SURVIVORS
        )

    def _try(
        self, candidates: list[Candidate], trials: Sequence[TrialScenario]
    ) -> list[CandidateScore]:
        found = self.summaries(candidates, trials)
        return [self._standing(*one) for one in zip(candidates, found, strict=True)]

    def _standing(self, candidate: Candidate, found: list[dict[str, Any]] | str) -> CandidateScore:
        if isinstance(found, str):
            return make_failed_score(candidate, len(self.goals), len(self.trials), found)
        values = tuple(map(_figures, found))
        shipped = self.standings[SHIPPED.key].values
        losses = tuple(
            tuple(goal.loss(ours[goal.figure], self._shipped(goal, trial)) for goal in self.goals)
            for trial, ours in enumerate(values)
        )
        left_out = tuple(
            ((ours["unserved"] or 0) - (theirs["unserved"] or 0)) / max(summary["requests"], 1)
            for ours, theirs, summary in zip(values, shipped, found, strict=False)
        )
        fate = has_outcome_goal(self.goals)
        return CandidateScore(
            candidate, losses, left_out, len(self.trials), values, has_outcome_goal=fate
        )

    def _shipped(self, goal: FigureGoal, trial: int) -> float | None:
        """Return a metric of the engine's scheduler in a trial, or the mean over other trials."""
        values = [one[goal.figure] for one in self.standings[SHIPPED.key].values]
        known = [value for value in values if value is not None]
        return values[trial] if values[trial] is not None or not known else mean(known)

    def front(self) -> list[CandidateScore]:
        """Return the Pareto front of the candidates, in order of their score."""
        ran = [one for one in self.standings.values() if not one.why]
        free = [one for one in ran if not any(_beats(other, one) for other in ran)]
        return sorted(free, key=lambda one: (one.score, one.candidate.parts))


def _figures(summary: Mapping[str, Any]) -> dict[str, float | None]:
    """Return the metrics of a run. If no request was served, return only metrics about unserved
    requests.
    """
    found = compute_objective_figures(summary)
    return (
        found
        if summary["finished"]
        else {k: found[k] if k in UNSERVED_FIGURES else None for k in found}
    )


def make_failed_score(candidate: Candidate, goals: int, trials: int, why: str) -> CandidateScore:
    """Return the worst possible score, for a candidate that cannot be run."""
    return CandidateScore(
        candidate, ((NO_FIGURE,) * goals,) * trials, (1.0,) * trials, trials, why=why
    )


def _beats(one: CandidateScore, other: CandidateScore) -> bool:
    pairs = list(zip(one.fitness, other.fitness, strict=True))
    return all(a <= b for a, b in pairs) and any(a < b for a, b in pairs)
