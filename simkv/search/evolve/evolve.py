"""A search from beginning to end: candidates are tried, one wins, and it is judged by other trials.

search = Search((Path("forty.yaml"),), ("e2e_ms.mean",), budget=200)
with bench_for(Path("points.jsonl")) as bench:
    found = evolve(search, bench)
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from simkv.core.engine import EngineSpec
from simkv.core.errors import InputError, nearest
from simkv.core.rule import Seam
from simkv.scenario.limits import parse_limits
from simkv.scenario.load import load
from simkv.scenario.own.source import trusted
from simkv.scenario.scenario import Scenario
from simkv.schedulers.registry import ENGINES, spec_of
from simkv.search.bench import Advance, Bench
from simkv.search.evolve.aims import Aim, goals_of, says_fate
from simkv.search.evolve.conditions import Ground, Tryout, ground_of, stands
from simkv.search.evolve.contest import Contest, Entry
from simkv.search.evolve.final import decided, seats_of
from simkv.search.evolve.judge import Bill, Ruling, judge_winner
from simkv.search.evolve.knobs import tune
from simkv.search.evolve.propose import Proposer, propose
from simkv.search.evolve.rules import draw_rules, grow_rules
from simkv.search.fields import NoSuchField, with_field
from simkv.search.knobs import VARIANTS, Axis, parse_axis

#: Tries candidates on a contest.
_Look = Callable[[Advance | None], None]


@dataclass(frozen=True)
class Search:
    """What is looked for: in these scenarios, for these objectives, with so many candidates.

    ``over`` are knobs as for ``--over``; ``propose`` is a command that writes schedulers; without
    both, rules are searched. ``random`` draws rules only. ``train``, ``final`` and ``test`` are how
    many seeds (or windows of a trace) are searched by, the best few compete on, and the winner is
    judged by.
    """

    scenarios: tuple[Path, ...]
    objectives: tuple[str, ...]
    budget: int
    over: tuple[str, ...] = ()
    propose: str | None = None
    random: bool = False
    goodput: tuple[str, ...] = ()
    variant: str | None = None
    overrides: tuple[str, ...] = ()
    train: int = 3
    final: int = 6
    test: int = 6
    seed: int = 0
    profile_error: float | None = None


@dataclass(frozen=True)
class Evolution:
    """What came of a search. ``what`` was tried, in plural; ``failed`` could not be run.

    ``winner`` is as it stood in the ``final``, of which there is none without something to draw.
    """

    name: str
    what: str
    goals: tuple[Aim, ...]
    ground: Ground
    seams: tuple[Seam, ...]
    standings: tuple[Entry, ...]
    front: tuple[Entry, ...]
    final: tuple[Entry, ...]
    winner: Entry
    judged: tuple[Ruling, ...]
    costs: tuple[Bill, ...]
    notes: tuple[str, ...] = ()
    fate: bool = False
    asked: Search | None = field(default=None, compare=False)

    @property
    def tried(self) -> int:
        """Candidates of the search, without what is shipped; those of the final come on top."""
        return len(self.standings) - 1

    @property
    def failed(self) -> int:
        """Those that could not be run."""
        return sum(bool(one.why) for one in self.standings)

    @property
    def holds(self) -> bool:
        """Whether there is a winner and it holds wherever it was judged."""
        return bool(self.winner.candidate.change) and all(one.holds for one in self.judged)


def evolve(
    search: Search, bench: Bench, folder: Path | None = None, advance: Advance | None = None
) -> Evolution:
    """Look for something better. ``folder`` keeps studies and proposals.

    Raises InputError for what cannot be searched, RunsFailed if what is shipped cannot be run.
    """
    limits = dict(parse_limits(search.goodput)) if search.goodput else {}
    goals = goals_of(search.objectives, limits)
    scenarios = [_scenario(path, search) for path in search.scenarios]
    ground = ground_of(scenarios, search.train, search.final, search.test)
    contest = Contest(ground.train, goals, limits, bench, firsts=ground.scenarios)
    engine = spec_of(scenarios[0][0].engine)
    seats = seats_of(search.budget, ground)
    look = _how(replace(search, budget=search.budget - seats), engine, contest, folder)
    contest.start()
    look(advance)
    winner, final = decided(contest, ground, seats)
    judged: list[Ruling] = []
    costs: list[Bill] = []
    ways, notes = stands(ground, search.profile_error)
    if winner.candidate.change:
        judged, costs = judge_winner(winner.candidate, ways, goals, limits, bench)
    return Evolution(
        scenarios[0][0].name,
        "knob settings" if search.over else "proposals" if search.propose else "rules",
        goals,
        ground,
        engine.seams,
        tuple(contest.standings.values()),
        tuple(contest.front()),
        tuple(final),
        winner,
        tuple(judged),
        tuple(costs),
        tuple(notes),
        says_fate(goals),
        search,
    )


def _scenario(path: Path, search: Search) -> tuple[Scenario, Path]:
    """The variant of a scenario file that is asked for, the first if none is."""
    variants = load(path, search.overrides)
    if search.variant is not None and search.variant not in variants:
        raise InputError(
            f"--variant {search.variant}: there is no such variant"
            f"{nearest(search.variant, variants)}; expected one of {', '.join(variants)}"
        )
    chosen = variants[search.variant or next(iter(variants))]
    return chosen, path.parent.resolve()


def _how(search: Search, engine: EngineSpec, contest: Contest, folder: Path | None) -> _Look:
    if search.over and search.propose:
        raise InputError("--propose: goes without --over; expected one of them")
    if search.propose and not trusted():
        raise InputError(
            f"--propose {search.propose}: what it writes is run; say --trust (in Python trust=True)"
        )
    if search.propose:
        kept = (folder or Path()) / "proposals"
        return lambda advance: propose(
            contest, Proposer(search.propose or "", kept), search.budget, advance
        )
    if search.over:
        axes = [_axis(text, contest.trials[0]) for text in search.over]
        store = folder / "study.journal" if folder else None
        name = _name(search, axes)
        return lambda advance: tune(contest, axes, search.budget, search.seed, store, name, advance)
    if not engine.seams:
        able = " and ".join(name for name, one in ENGINES.items() if one.seams)
        raise InputError(
            f"engine {engine.name} has no seams for rules, {able} have; expected --over or "
            "--propose"
        )
    grow = draw_rules if search.random else grow_rules
    return lambda advance: grow(contest, engine.seams, search.budget, search.seed, advance)


def _axis(text: str, trial: Tryout) -> Axis:
    axis = parse_axis(text)
    if axis.path == VARIANTS:
        raise InputError(f"--over {text}: expected a field; see --variant")
    try:
        with_field(trial.scenario, axis.path, axis.at(0.0), trial.folder)
    except NoSuchField as error:
        raise InputError(f"--over {text}: {error}") from error
    except InputError:
        pass  # one of its values does not go with the others, which the search will find out
    return axis


def _name(search: Search, axes: Sequence[Axis]) -> str:
    """A study is of one question: these scenarios, knobs and objectives."""
    asked = (search.scenarios, search.objectives, search.variant, search.overrides, axes)
    return hashlib.sha256(repr((asked, search.train, search.goodput)).encode()).hexdigest()[:16]
