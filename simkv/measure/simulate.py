"""Run scenarios: from a checked scenario to its record and figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import simpy

from simkv.core.request import Request
from simkv.core.scheduler import Scheduler, blocks_for
from simkv.costs.erring import Erring, StepKind
from simkv.costs.load import Executor
from simkv.costs.profile import Profile, load_profile
from simkv.costs.simulated import SimulatedExecutor
from simkv.loop.engine import Engine, serve
from simkv.loop.fleet.fleet import Fleet
from simkv.loop.fleet.world import Plan, build_fleet, least_known, plans
from simkv.loop.pipeline import Pipeline, remarks
from simkv.loop.record import Record
from simkv.measure.fidelity import Fidelity, fidelity
from simkv.measure.fleet import fleet_figures
from simkv.measure.metrics import request_rows, step_rows, summary
from simkv.scenario.load import load
from simkv.scenario.scenario import Scenario
from simkv.schedulers.fastdeploy.scheduler import FastDeploy
from simkv.schedulers.registry import build
from simkv.why.diagnosis import Diagnosis, block_size, diagnose
from simkv.why.fleet import diagnose_fleet
from simkv.workload.workload import clients


@dataclass(frozen=True)
class Result:
    """One variant of a scenario, run: its record, its figures and what a reader must know.

    ``notes`` say where the result leaves the range of the cost profile, which requests can never
    fit into the cache, and what went wrong in a pipeline. ``fidelity`` is how far the seconds can
    be trusted. Of a ``fleet`` the record is one for all replicas (``simkv.loop.fleet.merge``), and
    ``plans`` say what each replica is.
    """

    scenario: Scenario
    record: Record
    summary: dict[str, Any]
    notes: list[str]
    profile: Profile
    fidelity: Fidelity
    fleet: Fleet | None = None
    plans: Sequence[Plan] = ()

    @property
    def profiles(self) -> dict[str, Profile]:
        """All cost profiles of the run, by what the scenario calls them."""
        found = {self.scenario.profile: self.profile}
        return found | {plan.profile_name: plan.profile for plan in self.plans}

    @property
    def parts(self) -> dict[str, Record]:
        """The records whose steps are in order of time: that of the run, or those of a fleet's
        replicas by name."""
        return {"": self.record} if self.fleet is None else self.fleet.parts

    def apart(self) -> dict[str, Result]:
        """What can be drawn over time: the run, or those of a fleet's replicas by name."""
        if self.fleet is None:
            return {"": self}
        found = {}
        for stint in self.fleet.stints:
            plan, record = self.plans[stint.replica], stint.engine.record
            record.alone_s = self.record.alone_s
            scenario = self.scenario.model_copy(update={"engine": plan.engine, "fleet": None})
            figures = {"notes": self.notes, "fidelity": self.fidelity.to_json()}
            found[stint.name] = Result(
                scenario,
                record,
                {**summary(record), **figures},
                self.notes,
                plan.profile,
                self.fidelity,
            )
        return found

    def request_rows(self, variant: str) -> list[dict[str, Any]]:
        """The rows of ``requests.csv``; in a fleet they say on which replicas a request was."""
        replicas = None if self.fleet is None else self.fleet.where
        return request_rows(variant, self.record, replicas)

    def step_rows(self, variant: str) -> list[dict[str, Any]]:
        """The rows of ``steps.csv``; in a fleet they come replica by replica and say whose."""
        if self.fleet is None:
            return step_rows(variant, self.record)
        return [
            {**row, "replica": stint.replica}
            for stint in self.fleet.stints
            for row in step_rows(variant, stint.engine.record)
        ]

    @cached_property
    def diagnosis(self) -> Diagnosis:
        """Why it went as it did; worked out when first asked for."""
        if self.fleet is not None:
            sizes = [block_size(plan.engine) for plan in self.plans]
            return diagnose_fleet(self.fleet, self.record, sizes)
        return diagnose(self.record, block_size(self.scenario.engine))


def parts_of(results: Mapping[str, Result]) -> dict[str, Record]:
    """The records of some variants whose steps are in order of time, by variant and replica."""
    return {
        f"{variant}: {name}" if name else variant: record
        for variant, result in results.items()
        for name, record in result.parts.items()
    }


def apart(results: Mapping[str, Result]) -> dict[str, Result]:
    """Some variants with fleets taken apart into their replicas."""
    return {
        f"{variant}: {name}" if name else variant: part
        for variant, result in results.items()
        for name, part in result.apart().items()
    }


def run_file(path: Path, overrides: Sequence[str] = ()) -> dict[str, Result]:
    """Run all variants of a scenario file, in the file's order, and return them by name.

    ``overrides`` are ``path=value`` assignments. Raises InputError if the file, an override or
    a profile cannot be used.
    """
    return {
        name: run_scenario(scenario, path.parent)
        for name, scenario in load(path, overrides).items()
    }


def run_scenario(
    scenario: Scenario,
    folder: Path,
    resolved: Callable[[], None] | None = None,
    *,
    leaping: bool = True,
    scheduler: Scheduler | None = None,
    intervals: bool = True,
) -> Result:
    """Run one scenario; profiles given as files are looked for beside ``folder``.

    ``resolved`` is called whenever a request ends. ``leaping`` changes nothing but the work. A
    ``scheduler`` decides in place of the one that the scenario names. With ``intervals`` a profile
    that knows its error has the run simulated twice more, for the interval of each figure; not
    with a ``scheduler`` of one's own, which can run only once.
    Raises InputError if the profile cannot be used.
    """
    if scenario.fleet is not None:
        return _run_fleet(scenario, folder, resolved, leaping=leaping, intervals=intervals)
    profile = load_profile(scenario.profile, folder)
    executor = SimulatedExecutor(profile)
    once = scheduler or build(scenario.engine)
    record = _serve(scenario, once, executor, resolved, leaping=leaping)
    requests = [life.request for life in record.lives.values()]
    record.alone_s = {r.id: executor.alone(r.prompt_tokens, r.output_tokens) for r in requests}
    notes = [
        *scenario.workload.notes,
        *_never_fit(requests, once, scenario.engine),
        *(remarks(record) if scenario.pipeline else []),
        *_outside(executor),
    ]
    figures = summary(record)

    def again(changed: Callable[[Executor], Executor]) -> dict[str, Any]:
        other = changed(SimulatedExecutor(profile))
        return summary(_serve(scenario, build(scenario.engine), other, None, leaping=leaping))

    found = fidelity(
        profile,
        _outside_share(executor),
        figures,
        again if intervals and not scheduler else None,
    )
    figures |= {"notes": notes, "fidelity": found.to_json()}
    return Result(scenario, record, figures, notes, profile, found)


def _serve(
    scenario: Scenario,
    scheduler: Scheduler,
    executor: Executor,
    resolved: Callable[[], None] | None,
    *,
    leaping: bool,
) -> Record:
    """The scenario's workload through ``scheduler``, its steps as long as ``executor`` says.

    That is, times the scenario's own factors.
    """
    executor = _scaled(scenario, executor)
    env, ready, pacing = simpy.Environment(), scenario.engine_ready, scenario.pipeline
    if pacing and isinstance(scheduler, FastDeploy):
        engine: Engine = Pipeline(env, scheduler, executor, pacing, ready, resolved)
    else:
        engine = Engine(env, scheduler, executor, ready, resolved, leaping=leaping)
    return serve(engine, clients(scenario.workload, scenario.timeout), scenario.horizon)


def _scaled(scenario: Scenario, executor: Executor) -> Executor:
    """The executor with the scenario's own factors on the cost of its steps."""
    scale = scenario.step_scale
    if scale is None:
        return executor
    factors: dict[StepKind, float] = {
        "decode": scale.decode,
        "prefill": scale.prefill,
        "mixed": scale.mixed,
    }
    return Erring(executor, factors)


def _run_fleet(
    scenario: Scenario,
    folder: Path,
    resolved: Callable[[], None] | None,
    *,
    leaping: bool,
    intervals: bool,
) -> Result:
    """Run a scenario with replicas behind a router; arguments as for ``run_scenario``."""
    replicas = plans(scenario, folder)

    def once(
        resolved: Callable[[], None] | None, changed: Callable[[Executor], Executor] | None = None
    ) -> tuple[Fleet, Record]:
        sent = clients(scenario.workload, scenario.timeout)

        def dear(executor: Executor) -> Executor:
            executor = _scaled(scenario, executor)
            return executor if changed is None else changed(executor)

        fleet = build_fleet(scenario, replicas, sent, resolved, leaping=leaping, changed=dear)
        return fleet, serve(fleet, sent, scenario.horizon)

    fleet, record = once(resolved)
    requests = [life.request for life in record.lives.values()]
    alone = SimulatedExecutor(replicas[0].profile)
    record.alone_s = {r.id: alone.alone(r.prompt_tokens, r.output_tokens) for r in requests}
    executors = [
        executor
        for stint in fleet.stints
        if isinstance(executor := _measured(stint.engine.executor), SimulatedExecutor)
    ]
    notes = [
        *scenario.workload.notes,
        *_notes_on_replicas(fleet, replicas, requests),
        *(
            note
            for profile in dict.fromkeys(plan.profile.name for plan in replicas)
            for note in _outside(*(e for e in executors if e.profile.name == profile))
        ),
    ]
    figures = summary(record)
    found = fidelity(
        least_known(replicas),
        _outside_share(*executors),
        figures,
        (lambda changed: summary(once(None, changed)[1])) if intervals else None,
    )
    figures |= {
        "fleet": fleet_figures(fleet, record.end),
        "notes": notes,
        "fidelity": found.to_json(),
    }
    return Result(scenario, record, figures, notes, replicas[0].profile, found, fleet, replicas)


def _measured(executor: Executor) -> Executor:
    """The executor that asks the profile, inside one with factors."""
    return executor.inner if isinstance(executor, Erring) else executor


def _notes_on_replicas(
    fleet: Fleet, replicas: Sequence[Plan], requests: list[Request]
) -> list[str]:
    """What a reader must know of the replicas; what holds for several is said once."""
    notes: dict[str, list[int]] = {}
    for stint in fleet.stints:
        engine = stint.engine
        found = _never_fit(requests, engine.scheduler, replicas[stint.replica].engine)
        for note in [*found, *(remarks(engine.record) if isinstance(engine, Pipeline) else [])]:
            notes.setdefault(note, []).append(stint.replica)
    return [
        note if len(set(where)) == fleet.size else f"replica {', '.join(map(str, where))}: {note}"
        for note, where in notes.items()
    ]


def check_scenario(scenario: Scenario, folder: Path) -> None:
    """Raise the InputError that running the scenario would raise, without running it."""
    load_profile(scenario.profile, folder)
    build(scenario.engine)
    for plan in plans(scenario, folder) if scenario.fleet else []:
        build(plan.engine)
    clients(scenario.workload, scenario.timeout)


def _never_fit(requests: list[Request], scheduler: Scheduler, engine: Any) -> list[str]:
    """Requests whose KV needs more blocks than the whole cache has."""
    block_size = getattr(engine, "block_size", None)
    if block_size is None:
        return []
    too_large = [
        (blocks_for(r.prompt_tokens + r.output_tokens - 1, block_size), r.id)
        for r in requests
        if blocks_for(r.prompt_tokens + r.output_tokens - 1, block_size) > scheduler.num_blocks
    ]
    if not too_large:
        return []
    need, worst = max(too_large)
    return [
        f"{len(too_large)} requests can never fit: request {worst} needs {need} blocks of "
        f"{block_size} tokens, the cache has {scheduler.num_blocks}"
    ]


def _outside_share(*executors: SimulatedExecutor) -> float:
    """The share of the busy time that lay outside of the profiles' ranges."""
    busy = sum(executor.busy for executor in executors)
    return sum(executor.outside_s for executor in executors) / busy if busy else 0.0


def _outside(*executors: SimulatedExecutor) -> list[str]:
    """How much of the run lies where the cost profile, one for all executors, has no data."""
    notes = []
    profile, busy = executors[0].profile, sum(executor.busy for executor in executors)
    for feature in sorted({feature for executor in executors for feature in executor.outside}):
        there = [executor for executor in executors if feature in executor.outside]
        seconds = sum(executor.outside[feature] for executor in there)
        least = min(executor.extremes[feature][0] for executor in there)
        most = max(executor.extremes[feature][1] for executor in there)
        low, high = profile.range[feature]
        notes.append(
            f"outside the range of profile {profile.name} for {100.0 * seconds / busy:.1f} % of "
            f"the busy time: {feature} {least:g} to {most:g}, data from {low:g} to {high:g}"
        )
    return notes
