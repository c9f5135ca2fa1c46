"""Candidates of a plan: a scenario with different values of one setting, each run several times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from simkv.core.errors import InputError, spelling_hint
from simkv.costs.scaled_executor import ErrorSide, StepKind
from simkv.metrics.scenario_runner import check_scenario
from simkv.scenario.fleet_section import Outage
from simkv.scenario.objectives import Objective
from simkv.scenario.scenario import Scenario, StepScale
from simkv.scenario.scenario_loader import resolve_variants, variant_names
from simkv.scenario.yaml_document import YamlDocument
from simkv.study.random_seeds import reseed_scenario
from simkv.study.simulation_job import SimulationJob, make_job
from simkv.study.sweep_axes import (
    VARIANTS_AXIS,
    format_assignment,
    grid,
    parse_axis,
)

Number = int | float


@dataclass(frozen=True)
class PlanCondition:
    """Condition of a plan's run: its seed, step-time error and replica failure.

    ``side`` selects faster or slower steps, or is None. ``failing`` is true if one replica fails.
    ``repeat`` is the index of the seed.
    """

    side: ErrorSide | None = None
    failing: bool = False
    repeat: int = 0

    @property
    def without_failure(self) -> PlanCondition:
        """The seed and step-time error of the run, without a replica failure."""
        return PlanCondition(self.side, False, self.repeat)


@dataclass(frozen=True)
class PlanCandidates:
    """Candidates of one variant: the setting ``knob`` has one of the values ``candidates``.

    Later values should give better results. ``limits`` contains the latency limits (ms) of the
    goodput. ``factors`` contains factors that make steps faster or slower by the profile's error.
    ``own_error`` is true if the profile states its error. ``survive`` is true if one replica may
    fail. ``option`` is the command option of the setting.
    """

    document: YamlDocument
    overrides: tuple[str, ...]
    variant: str
    knob: str
    candidates: tuple[Number, ...]
    objectives: tuple[Objective, ...]
    limits: Mapping[str, float]
    factors: Mapping[ErrorSide, Mapping[StepKind, float]]
    own_error: bool = False
    survive: bool = False
    option: str = "--smallest"
    _scenarios: dict[int, Scenario] = field(default_factory=dict, compare=False, repr=False)

    def scenario(self, candidate: int) -> Scenario:
        """Return the scenario of the candidate with the given index.

        Raises InputError if the scenario is invalid.
        """
        if candidate not in self._scenarios:
            given = format_assignment(self.knob, self.candidates[candidate])
            document = YamlDocument(self.document.path, copy(self.document.tree))
            document.given_by = dict(self.document.given_by)
            found = resolve_variants(document, self.overrides, [given], self.option)[self.variant]
            self._scenarios[candidate] = found
        return self._scenarios[candidate]

    def check(self) -> None:
        """Raise InputError if the first or the last candidate cannot be run."""
        for candidate in sorted({0, len(self.candidates) - 1}):
            check_scenario(self.scenario(candidate), self.folder)

    @property
    def folder(self) -> Path:
        """Directory of the scenario file."""
        return self.document.path.parent.resolve()

    def job(
        self, candidate: int, condition: PlanCondition, calm: Mapping[str, Any] | None = None
    ) -> SimulationJob:
        """Return the job that runs a candidate with the seed, error and failure of ``condition``.

        ``calm`` is the summary of a run without a replica failure.
        """
        scenario = self.with_condition(self.scenario(candidate), condition)
        if condition.failing:
            assert calm is not None
            scenario = with_failure(scenario, calm["peak"])
        return self.job_of(scenario)

    def job_of(self, scenario: Scenario) -> SimulationJob:
        """Return the job that runs a scenario and computes the metrics of the objectives."""
        return make_job(scenario, self.folder, self.limits, peak=self.survive, growth=True)

    def with_condition(self, scenario: Scenario, condition: PlanCondition) -> Scenario:
        """Return the scenario with the seed and the step durations of ``condition``."""
        scenario = reseed_scenario(scenario, condition.repeat)
        if condition.side is None:
            return scenario
        own = scenario.step_scale or StepScale()
        if self.own_error:
            scale = own.model_copy(update={"error": condition.side})
        else:
            by = self.factors[condition.side]
            scale = own.model_copy(update={k: getattr(own, k) * x for k, x in by.items()})
        return scenario.model_copy(update={"step_scale": scale})


def parse_candidates(text: str, largest: bool) -> tuple[str, tuple[Number, ...]]:
    """Parse a setting in the syntax of ``--over``. Return its path, and its values in search order.

    Raises InputError if the text is invalid or a value is not a number.
    """
    option = "--largest" if largest else "--smallest"
    try:
        axis = parse_axis(text)
        values = [knobs[axis.path] for knobs in grid([axis])]
    except InputError as error:
        raise InputError(str(error).replace("--over", option)) from error
    if axis.path == VARIANTS_AXIS:
        raise InputError(
            f"{option} {text}: expected a scenario field; use --variant to select a variant"
        )
    numbers = [v for v in values if isinstance(v, int | float) and not isinstance(v, bool)]
    if len(numbers) < len(values):
        raise InputError(f"{option} {text}: expected numbers")
    return axis.path, tuple(sorted(numbers, reverse=largest))


def select_variants(
    document: YamlDocument, overrides: Sequence[str], wanted: Sequence[str]
) -> list[str]:
    """Return the ``wanted`` variants of a scenario file, by default all.

    Raises InputError if a name is unknown.
    """
    known = variant_names(document, overrides)
    for name in wanted:
        if name not in known:
            raise InputError(
                f"--variant {name}: unknown variant{spelling_hint(name, known)}; expected one of "
                f"{', '.join(known)}"
            )
    return [name for name in known if not wanted or name in wanted]


def with_failure(scenario: Scenario, peak: Mapping[str, Any]) -> Scenario:
    """Return the scenario in which one replica fails permanently at the ``peak`` of an earlier run.

    ``peak`` contains the time with the most requests in flight, and the replica with the most
    requests at that time.
    """
    fleet = scenario.fleet
    assert fleet is not None
    outage = Outage(replica=peak["replica"], at=peak["at_s"])
    failing = fleet.model_copy(update={"failures": [*fleet.failures, outage]})
    return scenario.model_copy(update={"fleet": failing})
