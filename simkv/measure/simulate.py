"""Run scenarios: from a checked scenario to its record and figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from math import inf
from pathlib import Path

from simkv.core.scheduler import Scheduler
from simkv.costs.erring import Erring
from simkv.costs.load import Executor
from simkv.costs.profile import Profile
from simkv.costs.simulated import SimulatedExecutor
from simkv.loop.world import ReplicaSpec, serve_scenario, specs
from simkv.measure.fidelity import RUN, fidelity
from simkv.measure.fleet import fleet_figures
from simkv.measure.intervals import MeasuredRun
from simkv.measure.made_for import notes_on_engines
from simkv.measure.metrics import summary
from simkv.measure.notes import (
    notes_on_profiles,
    notes_on_replicas,
    outside_share,
    unknown_outside,
)
from simkv.measure.result import Result
from simkv.scenario.load import load
from simkv.scenario.scenario import Scenario
from simkv.schedulers.registry import build
from simkv.why.gave_up import World, judge
from simkv.workload.workload import clients


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
    ``scheduler`` decides in place of the one that the scenario names, but not in a fleet. With
    ``intervals`` a profile that knows its error has the run simulated twice more, for the interval
    of each figure; not with a ``scheduler`` of one's own, which can run only once.
    Raises InputError if the profile cannot be used.
    """
    if scenario.fleet is not None:  # whose replicas cannot share one
        scheduler = None
    replicas = specs(scenario, folder)
    world = World(scenario, replicas, leaping, deepcopy(scheduler))
    run = serve_scenario(scenario, replicas, resolved, leaping=leaping, scheduler=scheduler)
    judge(run, world)
    record, fleet = run.record, run.fleet
    requests = [life.request for life in record.lives.values()]
    alone = SimulatedExecutor(replicas[0].profile)
    record.alone_s = {r.id: alone.alone(r.prompt_tokens, r.output_tokens) for r in requests}
    executors = [_measured(stint.engine.executor) for stint in run.stints]
    notes = [
        *scenario.workload.notes,
        *notes_on_replicas(run.stints, replicas, requests),
        *notes_on_engines(replicas),
        *notes_on_profiles(executors),
    ]
    figures = summary(record)

    def again(name: str, changed: Callable[[Executor], Executor]) -> MeasuredRun:
        other = serve_scenario(scenario, replicas, leaping=leaping, changed=changed)
        judge(other, replace(world, changed=changed))
        return MeasuredRun.of(name, other.record)

    found = fidelity(
        _least_known(replicas),
        outside_share(executors),
        MeasuredRun.of(RUN, record, figures),
        again if intervals and not scheduler else None,
        unknown_outside(executors),
    )
    if fleet is not None:
        figures["fleet"] = fleet_figures(fleet, record.end)
    figures |= {"notes": notes, "fidelity": found.to_json()}
    return Result(scenario, run, figures, notes, found, replicas)


def _measured(executor: Executor) -> SimulatedExecutor:
    """The executor that asks the profile, inside those with factors."""
    inner = executor
    while isinstance(inner, Erring):
        inner = inner.inner
    assert isinstance(inner, SimulatedExecutor)
    return inner


def _least_known(replicas: Sequence[ReplicaSpec]) -> Profile:
    """The profile that tells the least of its error, or the largest: the run is no surer."""

    def error(spec: ReplicaSpec) -> float:
        errors = spec.profile.fit.held_out.values()
        return max((error.p95 for error in errors), default=inf)

    return max(replicas, key=error).profile


def check_scenario(scenario: Scenario, folder: Path) -> None:
    """Raise the InputError that running the scenario would raise, without running it."""
    for spec in specs(scenario, folder):
        build(spec.engine)
    clients(scenario.workload, scenario.timeout)
