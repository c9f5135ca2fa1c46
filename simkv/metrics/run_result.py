"""What a run of a scenario leaves to its readers: the record, its figures and why they are so."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from simkv.costs.cost_profile import CostProfile
from simkv.explain.diagnosis import Diagnosis, diagnose_run
from simkv.explain.fleet_diagnosis import diagnose_fleet
from simkv.metrics.fidelity import Fidelity
from simkv.metrics.run_metrics import request_rows, step_rows, summarize
from simkv.scenario.scenario import Scenario
from simkv.schedulers.engine_registry import find_engine_spec
from simkv.sim.fleet.fleet import Fleet
from simkv.sim.run_record import RunRecord
from simkv.sim.simulation import ReplicaSpec, ScenarioRun


@dataclass(frozen=True)
class RunResult:
    """One variant of a scenario, run: its record, its figures and what a reader must know.

    ``notes`` say where the result leaves the range of the cost profile, which requests can never
    fit into the cache, and what went wrong in a pipeline. ``fidelity`` is how far the seconds can
    be trusted. ``run`` is the run itself, ``specs`` are what its replicas are made of; without a
    fleet there is one.
    """

    scenario: Scenario
    run: ScenarioRun
    summary: dict[str, Any]
    notes: list[str]
    fidelity: Fidelity
    specs: Sequence[ReplicaSpec]

    @property
    def short_summary(self) -> str:
        """The verdict and the figures that one asks for first."""
        figures = self.summary
        return (
            f"{figures['verdict']}, {figures['finished']} of {figures['requests']} finished in "
            f"{figures['makespan_s']:.6g} s, {figures['preemptions']} preemptions"
        )

    def __repr__(self) -> str:
        return f"<Result of {self.scenario.name}: {self.short_summary}>"

    @property
    def record(self) -> RunRecord:
        """One for all replicas (see ``simkv.sim.fleet.fleet_record``)."""
        return self.run.record

    @property
    def fleet(self) -> Fleet | None:
        """The fleet, where there is one."""
        return self.run.fleet

    @property
    def profile(self) -> CostProfile:
        """What the steps of the first replica cost."""
        return self.specs[0].profile

    @property
    def profiles(self) -> dict[str, CostProfile]:
        """All cost profiles of the run, by what the scenario calls them."""
        return {spec.profile_name: spec.profile for spec in self.specs}

    @property
    def parts(self) -> dict[str, RunRecord]:
        """The records whose steps are in order of time: that of the run, or those of a fleet's
        replicas by name."""
        return {"": self.record} if self.fleet is None else self.fleet.parts

    def apart(self) -> dict[str, RunResult]:
        """What can be drawn over time: the run, or those of a fleet's replicas by name."""
        if self.fleet is None:
            return {"": self}
        found = {}
        for stint in self.run.lifetimes:
            spec, record = self.specs[stint.replica], stint.engine.record
            record.isolated_s = self.record.isolated_s
            scenario = self.scenario.model_copy(update={"engine": spec.engine, "fleet": None})
            figures = {"notes": self.notes, "fidelity": self.fidelity.to_json()}
            found[stint.name] = RunResult(
                scenario,
                ScenarioRun(record, [stint]),
                {**summarize(record), **figures},
                self.notes,
                self.fidelity,
                [spec],
            )
        return found

    def request_rows(self, variant: str) -> list[dict[str, Any]]:
        """The rows of ``requests.csv``; in a fleet they say on which replicas a request was."""
        replicas = None if self.fleet is None else self.fleet.where
        return request_rows(variant, self.record, replicas)

    def step_rows(self, variant: str) -> list[dict[str, Any]]:
        """The rows of ``steps.csv``; in a fleet they come replica by replica and say whose."""
        return [
            row if self.fleet is None else {**row, "replica": stint.replica}
            for stint in self.run.lifetimes
            for row in step_rows(variant, stint.engine.record)
        ]

    @cached_property
    def diagnosis(self) -> Diagnosis:
        """Why it went as it did; worked out when first asked for."""
        sizes = [find_engine_spec(one.engine).block_size(one.engine) for one in self.specs]
        if self.fleet is None:
            return diagnose_run(self.record, sizes[0])
        return diagnose_fleet(self.fleet, self.record, sizes)


def records_by_replica(results: Mapping[str, RunResult]) -> dict[str, RunRecord]:
    """The records of some variants whose steps are in order of time, by variant and replica."""
    return {
        f"{variant}: {name}" if name else variant: record
        for variant, result in results.items()
        for name, record in result.parts.items()
    }


def split_by_replica(results: Mapping[str, RunResult]) -> dict[str, RunResult]:
    """Some variants with fleets taken apart into their replicas."""
    return {
        f"{variant}: {name}" if name else variant: part
        for variant, result in results.items()
        for name, part in result.apart().items()
    }
