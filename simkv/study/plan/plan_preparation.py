"""Check a plan request, and everything that the plan needs, before any run starts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from simkv.core.errors import InputError
from simkv.core.figure_registry import SESSION_METRICS
from simkv.costs.scaled_executor import ErrorSide
from simkv.scenario.objectives import complete_objectives, parse_objective
from simkv.scenario.scenario import Scenario
from simkv.scenario.scenario_costs import list_replica_costs
from simkv.scenario.scenario_loader import read_plan_section
from simkv.scenario.yaml_document import YamlDocument, read_document
from simkv.study.plan.plan_candidates import (
    PlanCandidates,
    PlanCondition,
    parse_candidates,
    select_variants,
)
from simkv.study.plan.plan_confidence import ProfileError, find_profile_error
from simkv.study.plan.plan_cost import Prices, find_price, find_prices
from simkv.study.plan.plan_request import PlanRequest
from simkv.study.random_seeds import find_seed, make_unseeded_error
from simkv.study.sweep_axes import format_assignment, grid, parse_axis
from simkv.workload.workload_section import build_clients

#: Default number of repeats of a random workload: the smallest number for which the range of
#: answers contains the median with 95 % confidence.
REPEATS = 6


@dataclass(frozen=True)
class PreparedPlan:
    """A checked request for a plan of one variant.

    ``repeats`` is the number of seeds, or 1 if the workload has no randomness. ``price`` is the
    price per hour of one ``gpu``. ``point`` is a text with the values of the settings for which
    separate plans are made (the field ``each`` of the request).
    """

    name: str
    request: PlanRequest
    case: PlanCandidates
    repeats: int
    error: ProfileError
    held_back: PlanCandidates | None
    gpu: str
    price: float | None
    point: str = ""

    @property
    def label(self) -> str:
        """Label of the plan: the variant and ``point``."""
        own = [] if self.case.variant == "run" else [self.case.variant]
        return " ".join([*own, self.point] if self.point else own)

    @property
    def nominal(self) -> tuple[PlanCondition, ...]:
        """Runs that the answer must satisfy: all seeds, without the profile's error."""
        return tuple(one for repeat in range(self.repeats) for one in self.seed_conditions(repeat))

    def seed_conditions(
        self, repeat: int, side: ErrorSide | None = None
    ) -> tuple[PlanCondition, ...]:
        """Return the runs for one seed: a run without a replica failure and, if requested, a run
        with a failure.
        """
        calm = PlanCondition(side, False, repeat)
        return (calm, replace(calm, failing=True)) if self.request.survive else (calm,)

    def side_conditions(self, side: ErrorSide) -> tuple[PlanCondition, ...]:
        """Return the runs for all seeds, with steps faster or slower by the profile's error."""
        return tuple(
            one for repeat in range(self.repeats) for one in self.seed_conditions(repeat, side)
        )


def prepare(
    source: Path | YamlDocument, request: PlanRequest, left_out: Callable[[str], None] | None = None
) -> list[PreparedPlan]:
    """Return one prepared plan for each variant and each combination of the settings in ``each``.

    ``left_out`` receives the impossible combinations, such as those whose weights do not fit.
    Raises InputError if the input is invalid or all combinations are impossible.
    """
    whole = read_document(source) if isinstance(source, Path) else source
    asked = request.with_defaults(
        read_plan_section(_overridden(whole, request.overrides)), whole.path.parent
    )
    if bool(asked.smallest) == bool(asked.largest):
        raise InputError(
            "--smallest: expected exactly one of --smallest and --largest, with a field and "
            "its candidate values, such as --smallest fleet.replicas=1..20"
        )
    knob, candidates = parse_candidates(asked.smallest or asked.largest or "", bool(asked.largest))
    objectives = complete_objectives(
        [parse_objective(text) for text in asked.objectives], asked.goodput
    )
    prices = find_prices(asked.prices, asked.gpu_price)
    combinations = grid([parse_axis(text) for text in asked.each])
    found: list[PreparedPlan] = []
    refused: list[InputError] = []
    for values in combinations:
        point = tuple(format_assignment(path, value) for path, value in values.items())
        overrides = (*asked.overrides, *point)
        try:
            for variant in select_variants(whole.copy(), overrides, asked.variants):
                case = PlanCandidates(
                    whole.copy(),
                    overrides,
                    variant,
                    knob,
                    candidates,
                    tuple(objectives),
                    asked.goodput,
                    {},
                    survive=bool(asked.survive),
                    option="--largest" if asked.largest else "--smallest",
                )
                found.append(_prepared(asked, case, prices, " ".join(point)))
        except InputError as error:
            if not point:
                raise
            refused.append(error)
            if left_out is not None:
                left_out(f"{' '.join(point)}: skipped: {error}")
    if not found:
        raise refused[0]
    return found


def _prepared(
    asked: PlanRequest, case: PlanCandidates, prices: Prices | None, point: str
) -> PreparedPlan:
    case.check()
    scenario = case.scenario(0)
    if asked.survive and scenario.fleet is None:
        raise InputError(f"--survive: requires a fleet; set fleet.replicas in {scenario.name}")
    of_sessions = [one for one in case.objectives if one.figure in SESSION_METRICS]
    if of_sessions and not build_clients(scenario.workload, scenario.timeout).after:
        raise InputError(f"--slo {of_sessions[0]}: requires a workload with sessions")
    profile = next(costs for _, costs in list_replica_costs(scenario)).load(case.folder)
    error = find_profile_error(profile, asked.profile_error)
    case = replace(case, factors=error.factors, own_error=error.own)
    held_back = None
    if asked.held_back:
        held_back = replace(case, overrides=(*case.overrides, *asked.held_back), _scenarios={})
        held_back.check()
    gpu = (prices.label if prices else None) or profile.gpu
    price = None if prices is None else find_price(gpu, prices.table, prices.source)
    repeats = _repeats(asked.repeats, scenario)
    return PreparedPlan(scenario.name, asked, case, repeats, error, held_back, gpu, price, point)


def _overridden(source: YamlDocument, overrides: Sequence[str]) -> YamlDocument:
    """Return the scenario with the overrides of the request, which apply to all candidates."""
    document = source.copy()
    for override in overrides:
        document.override(override)
    return document


def _repeats(asked: int | None, scenario: Scenario) -> int:
    by_chance = find_seed(scenario.workload) is not None
    if asked and asked > 1 and not by_chance:
        raise make_unseeded_error(asked)
    return asked or (REPEATS if by_chance else 1)
