"""Candidates, each tried once on every trial, and how they stand beside what is shipped."""

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
from simkv.study.evolve.trial_conditions import TrialScenario
from simkv.study.field_changes import with_field
from simkv.study.job_runner import JobRunner
from simkv.study.simulation_job import RunsFailed, SimulationJob, make_job

#: A share of requests not served weighs so many times as a share of a figure.
UNSERVED_WEIGHT = 10.0
#: What each part of a rule counts, as a share of a figure.
PART_PENALTY = 0.0005
#: So many of the best are run on.
HEAT_SURVIVORS = 10


@dataclass(frozen=True)
class Candidate:
    """Something to try: fields of the scenario and their values. ``parts`` is how long it is."""

    change: tuple[tuple[str, Any], ...] = ()
    parts: int = 0

    @property
    def key(self) -> str:
        """By which it is known."""
        return repr(self.change)

    def of(self, trial: TrialScenario) -> Scenario:
        """The trial's scenario with it. Raises InputError if that refuses it."""
        found = trial.scenario
        for path, value in self.change:
            found = with_field(found, path, value, trial.folder)
        return found


#: What is there: nothing is changed.
SHIPPED = Candidate()


@dataclass(frozen=True)
class CandidateScore:
    """How a candidate did: of each trial that it ran a loss for each goal against what is shipped.

    ``left_out`` is of each trial the share of requests that it leaves unserved and the shipped one
    does not. A trial of the ``trials`` that it did not run counts as what is shipped does there.
    ``why`` says why it could not be run.
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
        """For each goal the mean over the trials."""
        return tuple(sum(some) / self.trials for some in zip(*self.losses, strict=True))

    @cached_property
    def unserved(self) -> float:
        """The mean of ``left_out`` over the trials."""
        return sum(self.left_out) / self.trials

    @cached_property
    def fitness(self) -> tuple[float, ...]:
        """What it is chosen by, for each goal: loss, unserved and length; less is better."""
        more = PART_PENALTY * self.candidate.parts + (
            0.0 if self.has_outcome_goal else UNSERVED_WEIGHT * self.unserved
        )
        return tuple(loss + more for loss in self.loss)

    def after(self, trials: int) -> CandidateScore:
        """How it stood when it had run so many."""
        return replace(self, losses=self.losses[:trials], left_out=self.left_out[:trials])

    @property
    def gains(self) -> bool:
        """Whether anything at all is better than with what is shipped."""
        return not self.why and (self.unserved < 0 or any(loss < 0 for loss in self.loss))

    @property
    def score(self) -> float:
        """The mean of the fitness."""
        return sum(self.fitness) / len(self.fitness)


@dataclass
class Tournament:
    """What has been tried on some trials; ``standings`` are in the order in which it came.

    The first ``firsts`` trials are of a scenario each.
    """

    trials: Sequence[TrialScenario]
    goals: Sequence[FigureGoal]
    limits: Mapping[str, float]
    bench: JobRunner
    endings: bool = False
    firsts: int = 1
    standings: dict[str, CandidateScore] = field(default_factory=dict)

    def job(self, candidate: Candidate, trial: TrialScenario) -> SimulationJob:
        """What has to be run. Raises InputError if the candidate is none for this trial."""
        return make_job(candidate.of(trial), trial.folder, self.limits, endings=self.endings)

    def summaries(
        self, candidates: Sequence[Candidate], trials: Sequence[TrialScenario]
    ) -> list[list[dict[str, Any]] | str]:
        """Of each candidate the summaries of the trials, or why it has none."""
        jobs: list[list[SimulationJob] | str] = []
        for candidate in candidates:
            try:
                jobs.append([self.job(candidate, trial) for trial in trials])
            except InputError as error:
                jobs.append(str(error))
        failed = self.bench.run([job for some in jobs if not isinstance(some, str) for job in some])
        found: list[list[dict[str, Any]] | str] = []
        for some in jobs:
            if isinstance(some, str):
                found.append(some)
            elif broken := [failed[job.digest] for job in some if job.digest in failed]:
                found.append(str(broken[0]))
            else:
                found.append([self.bench.done[job.digest] for job in some])
        return found

    def start(self) -> CandidateScore:
        """Try what is shipped, by which all others are judged. Raises RunsFailed."""
        (found,) = self.summaries([SHIPPED], self.trials)
        if isinstance(found, str):
            raise RunsFailed(f"what is shipped cannot be run: {found}")
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
        """Try candidates; returns how they stand. What was tried before is not tried again.

        Unless ``thorough``, it goes in heats: the first trial, the first of each scenario, all. Who
        gains nothing at all so far, or is not among the ``HEAT_SURVIVORS`` best by the trials that
        it has run, is run in no more.
        """
        left = list({one.key: one for one in candidates if one.key not in self.standings}.values())
        every = len(self.trials)
        for heat in sorted({every} if thorough else {1, self.firsts, every}):
            ran = self._try(left, self.trials[:heat])
            self.standings.update({one.candidate.key: one for one in ran})
            left = [one.candidate for one in ran if one.gains and self._stays(one, heat)]
        return [self.standings[one.key] for one in candidates]

    def _stays(self, one: CandidateScore, heat: int) -> bool:
        so_far = [other.after(heat) for other in self.standings.values()]
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
        """What is shipped has in a trial; where it serves nobody, its mean over the others."""
        values = [one[goal.figure] for one in self.standings[SHIPPED.key].values]
        known = [value for value in values if value is not None]
        return values[trial] if values[trial] is not None or not known else mean(known)

    def front(self) -> list[CandidateScore]:
        """Those that nobody beats in every goal, the best on the whole first."""
        ran = [one for one in self.standings.values() if not one.why]
        free = [one for one in ran if not any(_beats(other, one) for other in ran)]
        return sorted(free, key=lambda one: (one.score, one.candidate.parts))


def _figures(summary: Mapping[str, Any]) -> dict[str, float | None]:
    """The figures of a run; if nobody was served only those that tell of that."""
    found = compute_objective_figures(summary)
    return (
        found
        if summary["finished"]
        else {k: found[k] if k in UNSERVED_FIGURES else None for k in found}
    )


def make_failed_score(candidate: Candidate, goals: int, trials: int, why: str) -> CandidateScore:
    """How a candidate stands that cannot be run."""
    return CandidateScore(
        candidate, ((NO_FIGURE,) * goals,) * trials, (1.0,) * trials, trials, why=why
    )


def _beats(one: CandidateScore, other: CandidateScore) -> bool:
    pairs = list(zip(one.fitness, other.fitness, strict=True))
    return all(a <= b for a, b in pairs) and any(a < b for a, b in pairs)
