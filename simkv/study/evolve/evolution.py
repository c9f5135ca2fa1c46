"""Run a search for a better scheduler: evaluate candidates, and evaluate the best one on held-out
trials.

Example:

    search = EvolutionRequest((Path("forty.yaml"),), ("e2e_ms.mean",), budget=200)
    with open_pooled_runner(Path("points.jsonl")) as runner:
        found = run_evolution(search, runner)
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from pathlib import Path

from simkv.core.engine_spec import EngineSpec
from simkv.core.errors import InputError, spelling_hint
from simkv.core.policy_language import PolicyHook
from simkv.scenario.custom.code_source import is_trusted
from simkv.scenario.goodput_limits import parse_goodput_limits
from simkv.scenario.scenario import Scenario
from simkv.scenario.scenario_loader import load
from simkv.schedulers.engine_registry import ENGINES, find_engine_spec
from simkv.study.evolve.external_proposals import Proposer, propose
from simkv.study.evolve.fitness import FigureGoal, has_outcome_goal, parse_goals
from simkv.study.evolve.knob_search import tune
from simkv.study.evolve.policy_search import evolve_policies, prune_policy, sample_policies
from simkv.study.evolve.tournament import SHIPPED, CandidateScore, Tournament
from simkv.study.evolve.trial_split import (
    TrialScenario,
    TrialSplit,
    build_evaluation_conditions,
    split_trials,
)
from simkv.study.evolve.winner_evaluation import RequestClassCost, WinnerEvaluation, evaluate_winner
from simkv.study.field_changes import NoSuchField, with_field
from simkv.study.job_runner import JobRunner, ProgressCallback
from simkv.study.sweep_axes import VARIANTS_AXIS, Axis, parse_axis

#: Function that evaluates candidates in a tournament.
_Look = Callable[[ProgressCallback | None], None]


@dataclass(frozen=True)
class EvolutionRequest:
    """Request for a search for a better scheduler.

    At most ``budget`` candidates are run on ``scenarios`` and compared by the metrics in
    ``objectives``. ``over`` contains the settings to search, in the syntax of ``--over``.
    ``propose`` is a command that writes schedulers. Without ``over`` and ``propose``, policies are
    searched: by random sampling if ``random`` is true, and by evolution otherwise. ``train``,
    ``final`` and ``test`` are the numbers of seeds (or trace windows) for the search, the final
    round and the evaluation of the winner.
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
    """Result of a search for a better scheduler.

    ``kind`` names what was searched, such as ``policies``. ``final`` contains the scores of the
    best candidates on further trials, or is empty without a final round.
    """

    name: str
    kind: str
    goals: tuple[FigureGoal, ...]
    split: TrialSplit
    policy_hooks: tuple[PolicyHook, ...]
    standings: tuple[CandidateScore, ...]
    front: tuple[CandidateScore, ...]
    final: tuple[CandidateScore, ...]
    winner: CandidateScore
    evaluations: tuple[WinnerEvaluation, ...]
    costs: tuple[RequestClassCost, ...]
    notes: tuple[str, ...] = ()
    has_outcome_goal: bool = False
    request: EvolutionRequest | None = field(default=None, compare=False)

    @property
    def tried(self) -> int:
        """Number of candidates tried, without the final round."""
        return len(self.standings) - 1

    @property
    def failed(self) -> int:
        """Number of candidates that could not be run."""
        return sum(bool(one.why) for one in self.standings)

    @property
    def holds(self) -> bool:
        """Whether the winner is significantly better than the engine's scheduler in every
        evaluation.
        """
        return bool(self.winner.candidate.change) and all(one.holds for one in self.evaluations)


def run_evolution(
    search: EvolutionRequest,
    runner: JobRunner,
    folder: Path | None = None,
    advance: ProgressCallback | None = None,
) -> Evolution:
    """Search for a better scheduler, and store the candidates and their results in ``folder``.

    Raises InputError if the search is invalid. Raises RunsFailed if the engine's scheduler cannot
    be run.
    """
    limits = dict(parse_goodput_limits(search.goodput)) if search.goodput else {}
    goals = parse_goals(search.objectives, limits)
    scenarios = [_scenario(path, search) for path in search.scenarios]
    ground = split_trials(scenarios, search.train, search.final, search.test)
    tournament = Tournament(ground.train, goals, limits, runner, scenarios=ground.scenarios)
    engine = find_engine_spec(scenarios[0][0].engine)
    seats = count_final_candidates(search.budget, ground)
    look = _how(replace(search, budget=search.budget - seats), engine, tournament, folder)
    tournament.start()
    look(advance)
    winner, final = run_final(tournament, ground, seats)
    judged: list[WinnerEvaluation] = []
    costs: list[RequestClassCost] = []
    ways, notes = build_evaluation_conditions(ground, search.profile_error)
    if winner.candidate.change:
        judged, costs = evaluate_winner(winner.candidate, ways, goals, limits, runner)
    return Evolution(
        scenarios[0][0].name,
        "knob settings" if search.over else "proposals" if search.propose else "policies",
        goals,
        ground,
        engine.policy_hooks,
        tuple(tournament.standings.values()),
        tuple(tournament.front()),
        tuple(final),
        winner,
        tuple(judged),
        tuple(costs),
        tuple(notes),
        has_outcome_goal(goals),
        search,
    )


def _scenario(path: Path, search: EvolutionRequest) -> tuple[Scenario, Path]:
    """Return the requested variant (default: the first) of a scenario file, and the directory of
    the file.
    """
    variants = load(path, search.overrides)
    if search.variant is not None and search.variant not in variants:
        raise InputError(
            f"--variant {search.variant}: unknown variant"
            f"{spelling_hint(search.variant, variants)}; expected one of {', '.join(variants)}"
        )
    chosen = variants[search.variant or next(iter(variants))]
    return chosen, path.parent.resolve()


def _how(
    search: EvolutionRequest, engine: EngineSpec, tournament: Tournament, folder: Path | None
) -> _Look:
    if search.over and search.propose:
        raise InputError("--propose: cannot be combined with --over; use one of the two")
    if search.propose and not is_trusted():
        raise InputError(
            f"--propose {search.propose}: simkv executes the code that this command writes; add "
            "--trust to allow this (in Python: trust=True)"
        )
    if search.propose:
        kept = (folder or Path()) / "proposals"
        return lambda advance: propose(
            tournament, Proposer(search.propose or "", kept), search.budget, advance
        )
    if search.over:
        axes = [_axis(text, tournament.trials[0]) for text in search.over]
        store = folder / "study.journal" if folder else None
        name = _name(search, axes)
        return lambda advance: tune(
            tournament, axes, search.budget, search.seed, store, name, advance
        )
    if not engine.policy_hooks:
        able = " and ".join(name for name, one in ENGINES.items() if one.policy_hooks)
        raise InputError(
            f"engine {engine.name} does not support custom policies; engines that do: {able}; "
            "use --over or --propose"
        )
    grow = sample_policies if search.random else evolve_policies
    return lambda advance: grow(
        tournament, engine.policy_hooks, search.budget, search.seed, advance
    )


def _axis(text: str, trial: TrialScenario) -> Axis:
    axis = parse_axis(text)
    if axis.path == VARIANTS_AXIS:
        raise InputError(
            f"--over {text}: expected a scenario field; use --variant to select a variant"
        )
    try:
        with_field(trial.scenario, axis.path, axis.at(0.0), trial.folder)
    except NoSuchField as error:
        raise InputError(f"--over {text}: {error}") from error
    except InputError:
        pass  # a value is incompatible with another setting; the search handles such candidates
    return axis


def _name(search: EvolutionRequest, axes: Sequence[Axis]) -> str:
    """Return a name of the study that is unique for its scenarios, settings and objectives."""
    asked = (search.scenarios, search.objectives, search.variant, search.overrides, axes)
    return hashlib.sha256(repr((asked, search.train, search.goodput)).encode()).hexdigest()[:16]


#: Fraction of the budget for the final round, and fraction of the final round for the finalists;
#: the rest of the final round is used to shorten the winner.
FINAL_SHARE, FINALIST_SHARE = 0.1, 0.6


def count_final_candidates(budget: int, ground: TrialSplit) -> int:
    """Return the number of candidates for the final round, or 0 without a final round."""
    seats = int(budget * FINAL_SHARE)
    return seats if ground.final and seats > 1 else 0


def run_final(
    tournament: Tournament, ground: TrialSplit, seats: int
) -> tuple[CandidateScore, list[CandidateScore]]:
    """Return the winner and the scores of the final round.

    ``seats`` is the maximum number of candidates in the final round. If it is 0, the winner is the
    best candidate of the search.
    """
    if not seats:
        return prune_policy(tournament, tournament.front()[0]), []
    final = Tournament(ground.final, tournament.goals, tournament.limits, tournament.runner)
    final.start()
    best = _best(tournament)[: max(ceil(seats * FINALIST_SHARE), 2)]
    best = final.add([one.candidate for one in best], thorough=True)
    winner = min([*best, final.standings[SHIPPED.key]], key=lambda one: one.score)
    winner = prune_policy(final, winner, seats - len(best))
    return winner, [one for key, one in final.standings.items() if key != SHIPPED.key]


def _best(tournament: Tournament) -> list[CandidateScore]:
    """Return the scores of the candidates, the best first. Equal candidates except the shortest are
    left out.
    """
    found: dict[object, CandidateScore] = {}
    tried = [one for key, one in tournament.standings.items() if key != SHIPPED.key and not one.why]
    for one in sorted(tried, key=lambda one: (one.score, one.candidate.parts)):
        found.setdefault((one.losses, one.left_out), one)
    return list(found.values())
