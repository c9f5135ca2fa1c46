"""Rules of the small language, searched by genetic programming, or drawn by chance to compare."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from simkv.core.rule import Seam
from simkv.search.bench import Advance
from simkv.search.evolve.contest import Candidate, Contest, Entry
from simkv.search.evolve.grow import Garden, Trees, parts_of, text_of

#: So many live on from one generation to the next, and so many are tried in each.
LIVING = BATCH = 20
#: So many are drawn before any is crossed or changed.
FIRST = 40
#: Shares of children that are drawn anew, and of the others that have two parents.
FRESH, CROSSED = 0.1, 0.4
#: So often somebody new is looked for before the search gives up: the language is exhausted.
PATIENCE = 500


@dataclass(eq=False)
class _Plant:
    """A rule as trees, and DEAP's ``fitness`` of it."""

    trees: Trees
    text: str
    fitness: Any = None

    @property
    def candidate(self) -> Candidate:
        return rule_of(self.text)


def rule_of(text: str) -> Candidate:
    """A rule as something to try."""
    return Candidate((("engine.rule", text),), parts_of(text))


def grow_rules(
    contest: Contest, seams: Sequence[Seam], budget: int, seed: int, advance: Advance | None = None
) -> None:
    """Try ``budget`` rules: at first random ones, then children of the best (NSGA-II)."""
    from deap import base, tools

    kind = type("Less", (base.Fitness,), {"weights": (-1.0,) * len(contest.goals)})
    search = _Search(contest, Garden(seams, seed), budget, advance)
    living = search.try_all(search.drawn(min(FIRST, budget)), kind)
    while not search.done:
        living = tools.selNSGA2(living, min(LIVING, len(living)))
        children = search.try_all(search.children(living), kind)
        if not children:
            return
        living += children


def draw_rules(
    contest: Contest, seams: Sequence[Seam], budget: int, seed: int, advance: Advance | None = None
) -> None:
    """Try ``budget`` rules, each drawn by chance."""
    search = _Search(contest, Garden(seams, seed), budget, advance)
    while not search.done and search.try_all(search.drawn(BATCH), None):
        pass


def pruned(contest: Contest, winner: Entry, most: int = PATIENCE) -> Entry:
    """The rule without the decisions that it could as well leave to the engine; ``most`` tries."""
    lines = str(dict(winner.candidate.change).get("engine.rule", "")).splitlines()
    for line in lines[:most] if len(lines) > 1 else []:
        most -= 1
        shorter = "\n".join(other for other in lines if other != line)
        (entry,) = contest.add([rule_of(shorter)], thorough=True)
        if entry.score <= winner.score:
            return pruned(contest, entry, most)
    return winner


@dataclass
class _Search:
    """What both have in common: nobody is tried twice, and no more than the budget."""

    contest: Contest
    garden: Garden
    budget: int
    advance: Advance | None
    tried: int = 0

    def __post_init__(self) -> None:
        self._seen: set[str] = set()

    @property
    def done(self) -> bool:
        return self.tried >= self.budget

    def drawn(self, count: int) -> list[_Plant]:
        """New random rules."""
        return self._new(count, iter(self.garden.draw, None))

    def children(self, living: Sequence[_Plant]) -> list[_Plant]:
        """New rules from those that live, first of which the fittest."""
        return self._new(BATCH, self._born(living))

    def _born(self, living: Sequence[_Plant]) -> Iterator[Trees]:
        garden, places = self.garden, range(len(living))

        def parent() -> Trees:
            return living[min(garden.chosen(places), garden.chosen(places))].trees

        while True:
            if garden.chance(FRESH):
                yield garden.draw()
            elif garden.chance(CROSSED):
                yield garden.crossed(parent(), parent())
            else:
                yield garden.changed(parent())

    def _new(self, count: int, source: Iterator[Trees]) -> list[_Plant]:
        found: list[_Plant] = []
        misses = 0
        with self.garden:
            while len(found) < min(count, self.budget - self.tried) and misses < PATIENCE:
                trees = next(source)
                text = text_of(trees, self.garden.seams)
                misses += 1
                if text not in self._seen:
                    self._seen.add(text)
                    found.append(_Plant(trees, text))
                    misses = 0
        return found

    def try_all(self, plants: list[_Plant], kind: Any) -> list[_Plant]:
        """Try them; each gets its fitness."""
        standings: list[Entry] = self.contest.add([plant.candidate for plant in plants])
        for plant, standing in zip(plants, standings, strict=True):
            plant.fitness = kind and kind(standing.fitness)
        self.tried += len(plants)
        if self.advance:
            self.advance(self.tried, self.budget)
        return plants
