"""Run scenarios and assemble their records, metrics, notes and intervals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from math import inf
from pathlib import Path

from simkv.core.scheduler_protocol import Scheduler
from simkv.costs.cost_profile import CostProfile
from simkv.costs.front_end_costs import SPREAD
from simkv.costs.scaled_executor import ScaledExecutor
from simkv.costs.simulated_executor import SimulatedExecutor
from simkv.costs.step_load import Executor
from simkv.explain.timeouts import IsolatedRuns, classify_timeouts
from simkv.metrics.fidelity import RERUNS, RUN, estimate_fidelity
from simkv.metrics.fleet_metrics import fleet_figures
from simkv.metrics.intervals import MeasuredRun
from simkv.metrics.run_metrics import summarize
from simkv.metrics.run_notes import (
    engine_mismatch_notes,
    outside_range_share,
    profile_range_notes,
    replica_notes,
    unknown_error_share,
)
from simkv.metrics.run_result import RunResult
from simkv.metrics.session_metrics import session_figures
from simkv.scenario.scenario import Scenario
from simkv.scenario.scenario_loader import load
from simkv.schedulers.engine_registry import build_scheduler
from simkv.sim.simulation import (
    ReplicaSpec,
    build_replica_specs,
    scale_front_end,
    simulate_scenario,
)
from simkv.workload.workload_section import build_clients


def run_file(path: Path, overrides: Sequence[str] = ()) -> dict[str, RunResult]:
    """Run all variants of a scenario file and return the results by variant, in file order.

    ``overrides`` are assignments of the form ``path=value``. Raises InputError if the file, an
    override or a profile cannot be used.
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
) -> RunResult:
    """Run one scenario and return its result.

    Paths of profile files are relative to ``folder``. ``resolved`` is called whenever a request
    ends. ``leaping`` affects only the speed of the simulation. ``scheduler`` replaces the scheduler
    of the scenario, except in a fleet. With ``intervals``, two re-runs determine the interval of
    each metric, unless ``scheduler`` is given. Raises InputError if the profile cannot be used.
    """
    if scenario.fleet is not None:  # replicas cannot share one scheduler
        scheduler = None
    replicas = build_replica_specs(scenario, folder)
    world = IsolatedRuns(scenario, replicas, leaping, deepcopy(scheduler))
    sent = build_clients(scenario.workload, scenario.timeout)
    run = simulate_scenario(
        scenario, replicas, resolved, leaping=leaping, scheduler=scheduler, sent=sent
    )
    classify_timeouts(run, world)
    record, fleet = run.record, run.fleet
    requests = [life.request for life in record.requests.values()]
    alone = SimulatedExecutor(replicas[0].profile)
    record.isolated_s = {r.id: alone.alone(r.prompt_tokens, r.output_tokens) for r in requests}
    executors = [_measured(lifetime.engine.executor) for lifetime in run.lifetimes]
    notes = [
        *scenario.workload.notes,
        *replica_notes(run.lifetimes, replicas, requests),
        *engine_mismatch_notes(replicas),
        *profile_range_notes(executors),
    ]
    figures = summarize(record)

    def again(name: str, changed: Callable[[Executor], Executor]) -> MeasuredRun:
        factor = SPREAD if name == RERUNS["slower"] else 1 / SPREAD
        scaled = scale_front_end(scenario, replicas, factor)
        other = simulate_scenario(scaled, replicas, leaping=leaping, changed=changed)
        classify_timeouts(other, replace(world, scenario=scaled, changed=changed))
        return MeasuredRun.of(name, other.record)

    found = estimate_fidelity(
        _least_known(replicas),
        outside_range_share(executors),
        MeasuredRun.of(RUN, record, figures),
        again if intervals and not scheduler else None,
        unknown_error_share(executors),
    )
    if fleet is not None:
        figures["fleet"] = fleet_figures(fleet, record.end)
    if sent.after:
        load = scenario.workload
        figures["sessions"] = session_figures(
            record, sent, load.session_deadline, load.warm_up_sessions
        )
    figures |= {"notes": notes, "fidelity": found.to_json()}
    return RunResult(scenario, run, figures, notes, found, replicas)


def _measured(executor: Executor) -> SimulatedExecutor:
    """Return the executor that uses the cost profile, without its wrappers."""
    inner = executor
    while isinstance(inner, ScaledExecutor):
        inner = inner.inner
    assert isinstance(inner, SimulatedExecutor)
    return inner


def _least_known(replicas: Sequence[ReplicaSpec]) -> CostProfile:
    """Return the profile with the largest error, or a profile with an unknown error."""

    def error(spec: ReplicaSpec) -> float:
        errors = spec.profile.fit.held_out.values()
        return max((error.p95 for error in errors), default=inf)

    return max(replicas, key=error).profile


def check_scenario(scenario: Scenario, folder: Path) -> None:
    """Raise the InputError that running the scenario would raise, without simulating it."""
    for spec in build_replica_specs(scenario, folder):
        build_scheduler(spec.engine)
    build_clients(scenario.workload, scenario.timeout)
