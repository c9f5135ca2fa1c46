"""Candidates, each tried once on every trial, and how they stand beside what is shipped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from simkv.core.errors import InputError
from simkv.scenario.objectives import figures
from simkv.scenario.scenario import Scenario
from simkv.search.bench import Bench
from simkv.search.evolve.aims import NO_FIGURE, Aim, says_fate
from simkv.search.evolve.conditions import Tryout
from simkv.search.fields import with_field
from simkv.search.jobs import Job, RunsFailed, job_of

#: A share of requests not served weighs so many times as a share of a figure.
UNSERVED = 10.0
#: What each part of a rule counts, as a share of a figure.
PART = 0.0005


@dataclass(frozen=True)
class Candidate:
    """Something to try: fields of the scenario and their values. ``parts`` is how long it is."""

    change: tuple[tuple[str, Any], ...] = ()
    parts: int = 0

    @property
    def key(self) -> str:
        """By which it is known."""
        return repr(self.change)

    def of(self, trial: Tryout) -> Scenario:
        """The trial's scenario with it. Raises InputError if that refuses it."""
        found = trial.scenario
        for path, value in self.change:
            found = with_field(found, path, value, trial.folder)
        return found


#: What is there: nothing is changed.
SHIPPED = Candidate()


@dataclass(frozen=True)
class Entry:
    """How a candidate did on all trials: a mean ``loss`` for each goal against what is shipped.

    ``unserved`` is the share of requests that it leaves unserved and the shipped one does not.
    ``fitness`` is what it is chosen by: loss, unserved and length together, for each goal. ``why``
    says why it could not be run.
    """

    candidate: Candidate
    loss: tuple[float, ...]
    unserved: float
    values: tuple[Mapping[str, float | None], ...] = ()
    why: str = ""
    fate: bool = False

    @property
    def fitness(self) -> tuple[float, ...]:
        """Less is better."""
        more = PART * self.candidate.parts + (0.0 if self.fate else UNSERVED * self.unserved)
        return tuple(loss + more for loss in self.loss)

    @property
    def gains(self) -> bool:
        """Whether anything at all is better than with what is shipped."""
        return not self.why and (self.unserved < 0 or any(loss < 0 for loss in self.loss))

    @property
    def score(self) -> float:
        """The mean of the fitness."""
        return sum(self.fitness) / len(self.fitness)


@dataclass
class Contest:
    """What has been tried on some trials; ``standings`` are in the order in which it came."""

    trials: Sequence[Tryout]
    goals: Sequence[Aim]
    limits: Mapping[str, float]
    bench: Bench
    endings: bool = False
    standings: dict[str, Entry] = field(default_factory=dict)

    def job(self, candidate: Candidate, trial: Tryout) -> Job:
        """What has to be run. Raises InputError if the candidate is none for this trial."""
        return job_of(candidate.of(trial), trial.folder, self.limits, endings=self.endings)

    def summaries(
        self, candidates: Sequence[Candidate], trials: Sequence[Tryout]
    ) -> list[list[dict[str, Any]] | str]:
        """Of each candidate the summaries of the trials, or why it has none."""
        jobs: list[list[Job] | str] = []
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

    def start(self) -> Entry:
        """Try what is shipped, by which all others are judged. Raises RunsFailed."""
        (found,) = self.summaries([SHIPPED], self.trials)
        if isinstance(found, str):
            raise RunsFailed(f"what is shipped cannot be run: {found}")
        nothing = (0.0,) * len(self.goals)
        values = tuple(figures(summary) for summary in found)
        self.standings[SHIPPED.key] = Entry(SHIPPED, nothing, 0.0, values)
        return self.standings[SHIPPED.key]

    def add(self, candidates: Sequence[Candidate], *, thorough: bool = False) -> list[Entry]:
        """Try candidates; returns how they stand. What was tried before is not tried again.

        Unless ``thorough``, who gains nothing at all in the first trial is not run in the others.
        """
        new = {one.key: one for one in candidates if one.key not in self.standings}
        first = self._try(list(new.values()), self.trials[:1])
        more = [one.candidate for one in first if thorough or one.gains]
        whole = self._try(more, self.trials) if len(self.trials) > 1 else []
        self.standings.update({one.candidate.key: one for one in (*first, *whole)})
        return [self.standings[one.key] for one in candidates]

    def _try(self, candidates: list[Candidate], trials: Sequence[Tryout]) -> list[Entry]:
        found = self.summaries(candidates, trials)
        return [self._standing(*one) for one in zip(candidates, found, strict=True)]

    def _standing(self, candidate: Candidate, found: list[dict[str, Any]] | str) -> Entry:
        if isinstance(found, str):
            lost = (NO_FIGURE,) * len(self.goals)
            return Entry(candidate, lost, 1.0, why=found)
        values = tuple(figures(summary) for summary in found)
        shipped = self.standings[SHIPPED.key].values
        pairs = list(zip(values, shipped, found, strict=False))
        loss = tuple(
            sum(goal.loss(ours[goal.figure], theirs[goal.figure]) for ours, theirs, _ in pairs)
            / len(pairs)
            for goal in self.goals
        )
        unserved = sum(
            ((ours["unserved"] or 0) - (theirs["unserved"] or 0)) / max(summary["requests"], 1)
            for ours, theirs, summary in pairs
        )
        fate = says_fate(self.goals)
        return Entry(candidate, loss, unserved / len(pairs), values, fate=fate)

    def front(self) -> list[Entry]:
        """Those that nobody beats in every goal, the best on the whole first."""
        ran = [one for one in self.standings.values() if not one.why]
        free = [one for one in ran if not any(_beats(other, one) for other in ran)]
        return sorted(free, key=lambda one: (one.score, one.candidate.parts))


def _beats(one: Entry, other: Entry) -> bool:
    pairs = list(zip(one.fitness, other.fitness, strict=True))
    return all(a <= b for a, b in pairs) and any(a < b for a, b in pairs)
