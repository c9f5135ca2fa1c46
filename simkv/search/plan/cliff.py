"""The same fleet at other rates: where latency and starvation begin to run away."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from simkv.scenario.objectives import figures
from simkv.scenario.scenario import Scenario
from simkv.search.bench import Advance, Bench
from simkv.search.jobs import Job, RunsFailed, Summary
from simkv.search.plan.case import Candidates, Condition
from simkv.search.seeds import with_form
from simkv.workload.workload import Workload, clients

#: The rates that are tried, as multiples of the scenario's own.
FACTORS = (0.5, 0.8, 1.0, 1.25, 1.6)
#: Those that are tried after them, one by one, until a run misses an objective.
FARTHER = (2.5, 4.0, 6.4)


@dataclass(frozen=True)
class AtRate:
    """A run at another rate: ``factor`` times the scenario's own, ``rate`` requests per second."""

    factor: float
    rate: float
    condition: Condition
    summary: Summary
    values: Mapping[str, float | None]


def at_rate(scenario: Scenario, factor: float) -> Scenario | None:
    """The scenario with ``factor`` times as many requests per second, the same ones.

    None if its clients have no rate of their own: a burst, a list, or all at once.
    """
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


def rate_of(scenario: Scenario) -> float:
    """Requests per second, as given or else from the first to the last.

    Without those that wait for an answer.
    """
    workload = scenario.workload
    for asked in (workload.request_rate, getattr(workload.arrivals, "request_rate", None)):
        if asked is not None:
            return float(asked)
    sent = clients(workload, None)
    arrivals = np.array([r.arrival for r in sent.requests if r.id not in sent.after])
    span = float(arrivals.max() - arrivals.min()) if len(arrivals) > 1 else 0.0
    return (len(arrivals) - 1) / span if span > 0 else math.inf


def cliff(
    case: Candidates,
    candidate: int,
    conditions: Sequence[Condition],
    bench: Bench,
    factors: Sequence[float] = FACTORS,
    advance: Advance | None = None,
) -> list[AtRate]:
    """Try a candidate at other rates; nothing if its clients have none. Raises RunsFailed.

    Beyond ``factors`` it goes on until the cliff: a rate at which an objective is missed.
    """
    base = case.scenario(candidate)
    if at_rate(base, 1.0) is None:
        return []
    points = _at(case, base, conditions, bench, factors, advance)
    for factor in FARTHER:
        if not all(one.holds(point.values) for point in points for one in case.objectives):
            break
        points += _at(case, base, conditions, bench, [factor], advance)
    return points


def _at(
    case: Candidates,
    base: Scenario,
    conditions: Sequence[Condition],
    bench: Bench,
    factors: Sequence[float],
    advance: Advance | None,
) -> list[AtRate]:
    jobs: dict[tuple[float, Condition], Job] = {}
    for factor in factors:
        scenario = base if factor == 1.0 else at_rate(base, factor)
        assert scenario is not None
        for condition in conditions:
            jobs[factor, condition] = case.job_of(case.tried(scenario, condition))
    failed = bench.run(jobs.values(), advance)
    if failed:
        raise RunsFailed(f"{len(failed)} runs at other rates failed: {next(iter(failed.values()))}")
    rate = rate_of(base)
    return [
        AtRate(factor, factor * rate, condition, summary, figures(summary))
        for (factor, condition), job in jobs.items()
        for summary in [bench.done[job.digest]]
    ]
