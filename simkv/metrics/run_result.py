"""Result of a scenario run: its record, metrics, notes and diagnosis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from simkv.costs.cost_profile import CostProfile
from simkv.explain.diagnosis import Diagnosis, diagnose_fleet, diagnose_run
from simkv.metrics.fidelity import Fidelity
from simkv.metrics.run_metrics import request_rows, step_rows, summarize
from simkv.scenario.scenario import Scenario
from simkv.schedulers.engine_registry import find_engine_spec
from simkv.sim.fleet.fleet import Fleet
from simkv.sim.run_record import RunRecord
from simkv.sim.simulation import ReplicaSpec, ScenarioRun


@dataclass(frozen=True)
class RunResult:
    """Result of one variant of a scenario.

    ``summary`` contains the metrics as in ``summary.json``. ``notes`` contains sentences about
    problems of the run. ``fidelity`` contains error estimates. ``run`` is the simulated run.
    ``specs`` contains the specification of each replica.
    """

    scenario: Scenario
    run: ScenarioRun
    summary: dict[str, Any]
    notes: list[str]
    fidelity: Fidelity
    specs: Sequence[ReplicaSpec]

    @property
    def short_summary(self) -> str:
        """Verdict and main metrics as a sentence."""
        figures = self.summary
        return (
            f"{figures['verdict']}, {figures['finished']} of {figures['requests']} finished in "
            f"{figures['makespan_s']:.6g} s, {figures['preemptions']} preemptions"
        )

    def __repr__(self) -> str:
        return f"<Result of {self.scenario.name}: {self.short_summary}>"

    @property
    def record(self) -> RunRecord:
        """Combined record of all replicas (see ``simkv.sim.fleet.fleet_record``)."""
        return self.run.record

    @property
    def fleet(self) -> Fleet | None:
        """The simulated fleet, or None if the scenario has no fleet."""
        return self.run.fleet

    @property
    def profile(self) -> CostProfile:
        """Cost profile of the first replica."""
        return self.specs[0].profile

    @property
    def profiles(self) -> dict[str, CostProfile]:
        """Cost profiles of all replicas, by their names in the scenario."""
        return {spec.profile_name: spec.profile for spec in self.specs}

    @property
    def parts(self) -> dict[str, RunRecord]:
        """Record of each replica, by name. Without a fleet, the only name is ""."""
        return {"": self.record} if self.fleet is None else self.fleet.replica_records

    def apart(self) -> dict[str, RunResult]:
        """Return one result per replica of the fleet, by name. Without a fleet, the only name is
        "".
        """
        if self.fleet is None:
            return {"": self}
        found = {}
        for lifetime in self.run.lifetimes:
            spec, record = self.specs[lifetime.replica], lifetime.engine.record
            record.isolated_s = self.record.isolated_s
            scenario = self.scenario.model_copy(update={"engine": spec.engine, "fleet": None})
            figures = {"notes": self.notes, "fidelity": self.fidelity.to_json()}
            found[lifetime.name] = RunResult(
                scenario,
                ScenarioRun(record, [lifetime], self.run.clients),
                {**summarize(record), **figures},
                self.notes,
                self.fidelity,
                [spec],
            )
        return found

    def request_rows(self, variant: str) -> list[dict[str, Any]]:
        """Return the rows of ``requests.csv``. In a fleet, they contain the replicas of each
        request.
        """
        replicas = None if self.fleet is None else self.fleet.routes
        return request_rows(variant, self.record, replicas)

    def step_rows(self, variant: str) -> list[dict[str, Any]]:
        """Return the rows of ``steps.csv``. In a fleet, they contain the index of the replica."""
        return [
            row if self.fleet is None else {**row, "replica": lifetime.replica}
            for lifetime in self.run.lifetimes
            for row in step_rows(variant, lifetime.engine.record)
        ]

    @cached_property
    def diagnosis(self) -> Diagnosis:
        """Diagnosis of the run, computed on first access."""
        sizes = [find_engine_spec(one.engine).block_size(one.engine) for one in self.specs]
        if self.fleet is None:
            return diagnose_run(self.record, sizes[0])
        return diagnose_fleet(self.fleet, self.record, sizes)


def records_by_replica(results: Mapping[str, RunResult]) -> dict[str, RunRecord]:
    """Return the records of all variants, with one record per replica.

    The keys are ``variant`` or, in a fleet, ``variant: replica``.
    """
    return {
        f"{variant}: {name}" if name else variant: record
        for variant, result in results.items()
        for name, record in result.parts.items()
    }


def split_by_replica(results: Mapping[str, RunResult]) -> dict[str, RunResult]:
    """Return the results of all variants, with one result per replica.

    The keys are ``variant`` or, in a fleet, ``variant: replica``.
    """
    return {
        f"{variant}: {name}" if name else variant: part
        for variant, result in results.items()
        for name, part in result.apart().items()
    }
