"""Search policies of the policy language with genetic programming, or by random sampling."""

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

#: Number of policies that survive a generation, and number of policies tried per generation.
POPULATION = GENERATION_SIZE = 20
#: Number of random policies before the first crossover or mutation.
INITIAL_POPULATION = 40
#: Fraction of children that are random policies, and fraction of all other children with two
#: parents.
RANDOM_SHARE, CROSSOVER_SHARE = 0.1, 0.4
#: Maximum number of consecutive duplicates; the search then ends, because few new policies remain.
MAX_DUPLICATES = 500


@dataclass(eq=False)
class _Individual:
    """A policy as expression trees, with its DEAP ``fitness``."""

    trees: PolicyTrees
    text: str
    fitness: Any = None

    @property
    def candidate(self) -> Candidate:
        return make_policy_candidate(self.text)


def make_policy_candidate(text: str) -> Candidate:
    """Return a candidate that uses the policy ``text``."""
    return Candidate((("engine.rule", text),), count_parts(text))


def evolve_policies(
    tournament: Tournament,
    hooks: Sequence[PolicyHook],
    budget: int,
    seed: int,
    advance: ProgressCallback | None = None,
) -> None:
    """Try ``budget`` policies: random policies, then offspring of the best policies (NSGA-II)."""
    from deap import base, tools

    kind = type("Less", (base.Fitness,), {"weights": (-1.0,) * len(tournament.goals)})
    search = _Search(tournament, PolicyGenerator(hooks, seed), budget, advance)
    population = search.try_all(search.sample(min(INITIAL_POPULATION, budget)), kind)
    while not search.done:
        population = tools.selNSGA2(population, min(POPULATION, len(population)))
        children = search.try_all(search.children(population), kind)
        if not children:
            return
        population += children


def sample_policies(
    tournament: Tournament,
    hooks: Sequence[PolicyHook],
    budget: int,
    seed: int,
    advance: ProgressCallback | None = None,
) -> None:
    """Try ``budget`` random policies."""
    search = _Search(tournament, PolicyGenerator(hooks, seed), budget, advance)
    while not search.done and search.try_all(search.sample(GENERATION_SIZE), None):
        pass


def prune_policy(
    tournament: Tournament, winner: CandidateScore, most: int = MAX_DUPLICATES
) -> CandidateScore:
    """Remove unnecessary decisions from the winning policy, and return the score of the result.

    A decision is unnecessary if the score does not get worse without it. At most ``most`` policies
    are tried.
    """
    lines = str(dict(winner.candidate.change).get("engine.rule", "")).splitlines()
    for line in lines[:most] if len(lines) > 1 else []:
        most -= 1
        shorter = "\n".join(other for other in lines if other != line)
        (entry,) = tournament.add([make_policy_candidate(shorter)], thorough=True)
        if entry.score <= winner.score:
            return prune_policy(tournament, entry, most)
    return winner


@dataclass
class _Search:
    """Search that tries at most ``budget`` policies, and no policy twice."""

    tournament: Tournament
    generator: PolicyGenerator
    budget: int
    advance: ProgressCallback | None
    tried: int = 0

    def __post_init__(self) -> None:
        self._seen: set[str] = set()

    @property
    def done(self) -> bool:
        return self.tried >= self.budget

    def sample(self, count: int) -> list[_Individual]:
        """Return new random policies."""
        return self._new(count, iter(self.generator.sample, None))

    def children(self, population: Sequence[_Individual]) -> list[_Individual]:
        """Return new policies from crossover and mutation of ``population``, which is sorted best
        first.
        """
        return self._new(GENERATION_SIZE, self._breed(population))

    def _breed(self, population: Sequence[_Individual]) -> Iterator[PolicyTrees]:
        generator, places = self.generator, range(len(population))

        def parent() -> PolicyTrees:
            return population[min(generator.choose(places), generator.choose(places))].trees

        while True:
            if generator.chance(RANDOM_SHARE):
                yield generator.sample()
            elif generator.chance(CROSSOVER_SHARE):
                yield generator.crossover(parent(), parent())
            else:
                yield generator.mutate(parent())

    def _new(self, count: int, source: Iterator[PolicyTrees]) -> list[_Individual]:
        found: list[_Individual] = []
        misses = 0
        with self.generator:
            while len(found) < min(count, self.budget - self.tried) and misses < MAX_DUPLICATES:
                trees = next(source)
                text = format_policy(trees, self.generator.policy_hooks)
                misses += 1
                if text not in self._seen:
                    self._seen.add(text)
                    found.append(_Individual(trees, text))
                    misses = 0
        return found

    def try_all(self, individuals: list[_Individual], kind: Any) -> list[_Individual]:
        """Evaluate policies and set their fitness."""
        standings: list[CandidateScore] = self.tournament.add(
            [individual.candidate for individual in individuals]
        )
        for individual, standing in zip(individuals, standings, strict=True):
            individual.fitness = kind and kind(standing.fitness)
        self.tried += len(individuals)
        if self.advance:
            self.advance(self.tried, self.budget)
        return individuals
