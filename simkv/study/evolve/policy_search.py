"""Search rules of the policy language with genetic programming, or by random sampling."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from simkv.core.policy_language import PolicyHook
from simkv.study.evolve.genetic_operators import (
    PolicyGenerator,
    PolicyTrees,
    count_parts,
    format_policy,
)
from simkv.study.evolve.tournament import Candidate, CandidateScore, Tournament
from simkv.study.job_runner import ProgressCallback

#: Number of rules that survive a generation, and number of rules tried in each.
POPULATION = GENERATION_SIZE = 20
#: Number of random rules before the first crossover or mutation.
INITIAL_POPULATION = 40
#: Fraction of children that are new random rules, and fraction of the others with two parents.
RANDOM_SHARE, CROSSOVER_SHARE = 0.1, 0.4
#: Number of consecutive duplicates that ends the search: the language is exhausted.
MAX_DUPLICATES = 500


@dataclass(eq=False)
class _Plant:
    """A rule as trees, with its DEAP ``fitness``."""

    trees: PolicyTrees
    text: str
    fitness: Any = None

    @property
    def candidate(self) -> Candidate:
        return make_policy_candidate(self.text)


def make_policy_candidate(text: str) -> Candidate:
    """Return a rule as a candidate."""
    return Candidate((("engine.rule", text),), count_parts(text))


def evolve_policies(
    contest: Tournament,
    seams: Sequence[PolicyHook],
    budget: int,
    seed: int,
    advance: ProgressCallback | None = None,
) -> None:
    """Try ``budget`` rules: first random ones, then children of the best (NSGA-II)."""
    from deap import base, tools

    kind = type("Less", (base.Fitness,), {"weights": (-1.0,) * len(contest.goals)})
    search = _Search(contest, PolicyGenerator(seams, seed), budget, advance)
    living = search.try_all(search.drawn(min(INITIAL_POPULATION, budget)), kind)
    while not search.done:
        living = tools.selNSGA2(living, min(POPULATION, len(living)))
        children = search.try_all(search.children(living), kind)
        if not children:
            return
        living += children


def sample_policies(
    contest: Tournament,
    seams: Sequence[PolicyHook],
    budget: int,
    seed: int,
    advance: ProgressCallback | None = None,
) -> None:
    """Try ``budget`` random rules."""
    search = _Search(contest, PolicyGenerator(seams, seed), budget, advance)
    while not search.done and search.try_all(search.drawn(GENERATION_SIZE), None):
        pass


def prune_policy(
    contest: Tournament, winner: CandidateScore, most: int = MAX_DUPLICATES
) -> CandidateScore:
    """Return the rule without decisions that the engine makes as well, after ``most`` tries."""
    lines = str(dict(winner.candidate.change).get("engine.rule", "")).splitlines()
    for line in lines[:most] if len(lines) > 1 else []:
        most -= 1
        shorter = "\n".join(other for other in lines if other != line)
        (entry,) = contest.add([make_policy_candidate(shorter)], thorough=True)
        if entry.score <= winner.score:
            return prune_policy(contest, entry, most)
    return winner


@dataclass
class _Search:
    """Common part of both searches: no rule is tried twice, and at most ``budget`` rules are."""

    contest: Tournament
    garden: PolicyGenerator
    budget: int
    advance: ProgressCallback | None
    tried: int = 0

    def __post_init__(self) -> None:
        self._seen: set[str] = set()

    @property
    def done(self) -> bool:
        return self.tried >= self.budget

    def drawn(self, count: int) -> list[_Plant]:
        """Return new random rules."""
        return self._new(count, iter(self.garden.draw, None))

    def children(self, living: Sequence[_Plant]) -> list[_Plant]:
        """Return new rules bred from ``living``, with preference for the first of them."""
        return self._new(GENERATION_SIZE, self._born(living))

    def _born(self, living: Sequence[_Plant]) -> Iterator[PolicyTrees]:
        garden, places = self.garden, range(len(living))

        def parent() -> PolicyTrees:
            return living[min(garden.chosen(places), garden.chosen(places))].trees

        while True:
            if garden.chance(RANDOM_SHARE):
                yield garden.draw()
            elif garden.chance(CROSSOVER_SHARE):
                yield garden.crossover(parent(), parent())
            else:
                yield garden.changed(parent())

    def _new(self, count: int, source: Iterator[PolicyTrees]) -> list[_Plant]:
        found: list[_Plant] = []
        misses = 0
        with self.garden:
            while len(found) < min(count, self.budget - self.tried) and misses < MAX_DUPLICATES:
                trees = next(source)
                text = format_policy(trees, self.garden.policy_hooks)
                misses += 1
                if text not in self._seen:
                    self._seen.add(text)
                    found.append(_Plant(trees, text))
                    misses = 0
        return found

    def try_all(self, plants: list[_Plant], kind: Any) -> list[_Plant]:
        """Evaluate rules and set their fitness."""
        standings: list[CandidateScore] = self.contest.add([plant.candidate for plant in plants])
        for plant, standing in zip(plants, standings, strict=True):
            plant.fitness = kind and kind(standing.fitness)
        self.tried += len(plants)
        if self.advance:
            self.advance(self.tried, self.budget)
        return plants
