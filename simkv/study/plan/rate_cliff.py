"""Simulate the planned fleet at other request rates to find the rate at which it fails."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from simkv.costs.scaled_executor import ErrorSide
from simkv.scenario.objectives import compute_objective_figures
from simkv.scenario.scenario import Scenario
from simkv.study.job_runner import JobRunner, ProgressCallback
from simkv.study.plan.plan_candidates import PlanCandidates, PlanCondition
from simkv.study.random_seeds import with_form
from simkv.study.simulation_job import RunsFailed, Summary
from simkv.workload.workload_section import Workload, build_clients

#: Multiples of the scenario's rate, tried in order until an objective fails.
RATE_FACTORS_UP = (1.25, 1.6, 2.5, 4.0, 6.4)
#: Multiples tried in order until all objectives hold, if an objective already fails at the
#: scenario's rate.
RATE_FACTORS_DOWN = (0.8, 0.5)


@dataclass(frozen=True)
class RateResult:
    """A run at ``factor`` times the scenario's rate, which is ``rate`` (requests per second)."""

    factor: float
    rate: float
    condition: PlanCondition
    summary: Summary
    values: Mapping[str, float | None]


def scale_rate(scenario: Scenario, factor: float) -> Scenario | None:
    """Return the scenario with requests at ``factor`` times the rate, or None without a rate."""
    workload = scenario.workload
    changed = _faster(workload, factor)
    if changed is None:
        return None
    return scenario.model_copy(update={"workload": workload.model_copy(update=changed)})


def _faster(workload: Workload, factor: float) -> dict[str, Any] | None:
    form = workload.arrivals or workload.sessions
    if form is not None:
        names = ("request_rate", "ramp_up_start_rps", "ramp_up_end_rps")
        rates = {n: rate for n in names if (rate := getattr(form, n)) is not None}
        if not rates or math.inf in rates.values():
            return None
        return with_form(workload, **{name: factor * rate for name, rate in rates.items()})
    if workload.trace is None or workload.request_rate == math.inf:
        return None
    if workload.request_rate is not None:
        return {"request_rate": factor * workload.request_rate}
    return {"rate_scale": factor * workload.rate_scale}


def compute_rate(scenario: Scenario) -> float:
    """Return the rate in requests per second.

    Without a configured rate, it is the mean rate between the first and the last arrival.
    """
    workload = scenario.workload
    for asked in (workload.request_rate, getattr(workload.arrivals, "request_rate", None)):
        if asked is not None:
            return float(asked)
    sent = build_clients(workload, None)
    arrivals = np.array([r.arrival for r in sent.requests if r.id not in sent.after])
    span = float(arrivals.max() - arrivals.min()) if len(arrivals) > 1 else 0.0
    return (len(arrivals) - 1) / span if span > 0 else math.inf


def cliff(
    case: PlanCandidates,
    candidate: int,
    conditions: Sequence[PlanCondition],
    runner: JobRunner,
    advance: ProgressCallback | None = None,
) -> list[RateResult]:
    """Run a candidate at other request rates to find the rate at which an objective fails.

    The result is empty if the workload has no rate. The search is repeated with steps that are
    faster or slower by the profile's error. Raises RunsFailed if a run fails.
    """
    base = case.scenario(candidate)
    if scale_rate(base, 1.0) is None:
        return []

    def tried(factor: float, sides: Sequence[ErrorSide | None]) -> list[RateResult]:
        wanted = [condition for condition in conditions if condition.side in sides]
        return _at(case, base, wanted, runner, factor, advance)

    def holding(points: Sequence[RateResult]) -> dict[ErrorSide | None, bool]:
        found: dict[ErrorSide | None, bool] = {}
        for point in points:
            holds = all(one.holds(point.values) for one in case.objectives)
            found[point.condition.side] = holds and found.get(point.condition.side, True)
        return found

    points = tried(1.0, [condition.side for condition in conditions])
    at_once = holding(points)
    for factors, until in ((RATE_FACTORS_UP, False), (RATE_FACTORS_DOWN, True)):
        left = [side for side, holds in at_once.items() if holds is not until]
        for factor in factors:
            if not left or (factors is RATE_FACTORS_UP and None not in left):
                break
            here = tried(factor, left)
            points += here
            left = [side for side, holds in holding(here).items() if holds is not until]
    return sorted(points, key=lambda point: (point.factor, conditions.index(point.condition)))


def _at(
    case: PlanCandidates,
    base: Scenario,
    conditions: Sequence[PlanCondition],
    runner: JobRunner,
    factor: float,
    advance: ProgressCallback | None,
) -> list[RateResult]:
    scenario = base if factor == 1.0 else scale_rate(base, factor)
    assert scenario is not None
    jobs = {one: case.job_of(case.with_condition(scenario, one)) for one in conditions}
    failed = runner.run(jobs.values(), advance)
    if failed:
        raise RunsFailed(
            f"{len(failed)} runs at other request rates failed: {next(iter(failed.values()))}"
        )
    rate = compute_rate(base)
    return [
        RateResult(factor, factor * rate, condition, summary, compute_objective_figures(summary))
        for condition, job in jobs.items()
        for summary in [runner.done[job.digest]]
    ]
