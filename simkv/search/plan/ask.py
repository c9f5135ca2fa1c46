"""What is asked of a plan, and everything that it needs, checked before anything is run."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

from simkv.core.errors import InputError
from simkv.costs.erring import Side
from simkv.costs.profile import load_profile
from simkv.scenario.document import Document, read_document
from simkv.scenario.limits import parse_limits
from simkv.scenario.load import plan_section
from simkv.scenario.objectives import complete, parse_objective
from simkv.scenario.scenario import Scenario
from simkv.search.plan.case import Case, Condition, ladder, variants_of
from simkv.search.plan.price import price_of, read_prices
from simkv.search.plan.search import NEIGHBOURS
from simkv.search.plan.uncertain import Error, error_of
from simkv.search.seeds import nothing_drawn, seed_of

#: So many repeats, where the workload is drawn by chance: the least for which the range of their
#: answers holds the median with 95 % confidence.
REPEATS = 6


@dataclass(frozen=True)
class Ask:
    """What is asked for; what is None or empty is taken from the scenario's ``plan`` section.

    ``smallest`` or ``largest`` is a knob with its candidates, as for ``--over``. ``objectives`` and
    ``goodput`` are texts as on the command line. ``held_back`` are overrides that make another
    scenario of it, on which the answer is checked.
    """

    path: Path
    smallest: str | None = None
    largest: str | None = None
    objectives: tuple[str, ...] = ()
    goodput: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()
    variants: tuple[str, ...] = ()
    survive: int | None = None
    repeats: int | None = None
    profile_error: float | None = None
    prices: Path | None = None
    gpu: str | None = None
    gpus_per_replica: int | None = None
    held_back: tuple[str, ...] = ()
    neighbours: int = NEIGHBOURS
    exhaustive: bool = False
    cliff: bool = True


@dataclass(frozen=True)
class Prepared:
    """Everything that a plan for one variant needs, checked.

    ``repeats`` is 1 where nothing is drawn by chance. ``price`` is of an hour of one GPU.
    """

    name: str
    case: Case
    largest: bool
    survive: bool
    repeats: int
    error: Error
    neighbours: int
    exhaustive: bool
    cliff: bool
    held_back: Case | None
    gpu: str
    price: float | None
    gpus_per_replica: int

    @property
    def nominal(self) -> tuple[Condition, ...]:
        """The conditions that the answer must stand."""
        return tuple(one for repeat in range(self.repeats) for one in self.of(repeat))

    def of(self, repeat: int, side: Side | None = None) -> tuple[Condition, ...]:
        """The conditions with one seed, calm and, if asked for, with a failure."""
        calm = Condition(side, False, repeat)
        return (calm, replace(calm, failing=True)) if self.survive else (calm,)

    def on(self, side: Side) -> tuple[Condition, ...]:
        """All conditions on one side of the profile's error."""
        return tuple(one for repeat in range(self.repeats) for one in self.of(repeat, side))


def prepare(ask: Ask) -> list[Prepared]:
    """Check all that is asked for; one plan per variant. Raises InputError for what is wrong."""
    _check_numbers(ask)
    section = plan_section(_overridden(ask))
    smallest, largest = ask.smallest, ask.largest
    if not smallest and not largest:
        smallest, largest = section.smallest, section.largest
    if bool(smallest) == bool(largest):
        raise InputError(
            "--smallest: expected either --smallest or --largest, with a knob and its candidates, "
            "as in --smallest fleet.replicas=1..20"
        )
    knob, candidates = ladder(smallest or largest or "", bool(largest))
    limits = parse_limits(ask.goodput) if ask.goodput else section.goodput
    asked = [parse_objective(text) for text in ask.objectives or section.objectives]
    objectives = complete(asked, limits)
    survive = bool(section.survive if ask.survive is None else ask.survive)
    repeats = ask.repeats or section.repeats
    prices = ask.prices or (ask.path.parent / section.prices if section.prices else None)
    table = None if prices is None else read_prices(prices)
    given = section.profile_error if ask.profile_error is None else ask.profile_error
    found: list[Prepared] = []
    for variant in variants_of(ask.path, ask.overrides, ask.variants):
        case = Case(
            read_document(ask.path),
            ask.overrides,
            variant,
            knob,
            candidates,
            tuple(objectives),
            limits,
            {},
            survive,
        )
        case.check()
        scenario = case.scenario(0)
        if survive and scenario.fleet is None:
            raise InputError(f"--survive: needs a fleet; {scenario.name} has none: fleet.replicas")
        profile = load_profile(scenario.profile, case.folder)
        error = error_of(profile, given)
        case = replace(case, factors=error.factors)
        held_back = None
        if ask.held_back:
            held_back = replace(case, overrides=(*ask.overrides, *ask.held_back), _scenarios={})
            held_back.check()
        gpu = ask.gpu or section.gpu or profile.gpu
        found.append(
            Prepared(
                scenario.name,
                case,
                bool(largest),
                survive,
                _repeats(repeats, scenario),
                error,
                ask.neighbours,
                ask.exhaustive,
                ask.cliff,
                held_back,
                gpu,
                None if table is None else price_of(gpu, table, f"{prices}"),
                ask.gpus_per_replica or section.gpus_per_replica,
            )
        )
    return found


def _check_numbers(ask: Ask) -> None:
    """Raise InputError for numbers that mean nothing, wherever they come from."""
    for name, value, least, most in (
        ("--survive", ask.survive, 0, 1),
        ("--repeats", ask.repeats, 1, math.inf),
        ("--profile-error", ask.profile_error, 0, 0.9),
        ("--gpus-per-replica", ask.gpus_per_replica, 1, math.inf),
        ("--neighbours", ask.neighbours, 0, math.inf),
    ):
        if value is not None and not least <= value <= most:
            upto = "on" if most == math.inf else f"to {most}"
            raise InputError(f"{name} {value}: expected a number from {least} {upto}")


def _overridden(ask: Ask) -> Document:
    """The scenario file with the overrides that apply to all candidates."""
    document = read_document(ask.path)
    for assignment in ask.overrides:
        document.override(assignment)
    return document


def _repeats(asked: int | None, scenario: Scenario) -> int:
    by_chance = seed_of(scenario.workload) is not None
    if asked and asked > 1 and not by_chance:
        raise nothing_drawn(asked)
    return asked or (REPEATS if by_chance else 1)
