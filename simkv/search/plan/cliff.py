"""The same fleet at other rates: where latency and starvation begin to run away."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from simkv.costs.erring import Side
from simkv.scenario.objectives import figures
from simkv.scenario.scenario import Scenario
from simkv.search.bench import Advance, Bench
from simkv.search.jobs import RunsFailed, Summary
from simkv.search.plan.case import Candidates, Condition
from simkv.search.seeds import with_form
from simkv.workload.workload import Workload, clients

#: Rates as multiples of the scenario's own that are tried one by one until an objective is missed.
UPWARDS = (1.25, 1.6, 2.5, 4.0, 6.4)
#: Those that are tried one by one, if it is missed at once, until none is.
DOWNWARDS = (0.8, 0.5)


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
    advance: Advance | None = None,
) -> list[AtRate]:
    """Try a candidate at other rates; nothing if its clients have none. Raises RunsFailed.

    Upwards until an objective is missed, or where that is so at once downwards until none is; each
    side of the profile's error by itself, but none beyond where the profile misses it.
    """
    base = case.scenario(candidate)
    if at_rate(base, 1.0) is None:
        return []

    def tried(factor: float, sides: Sequence[Side | None]) -> list[AtRate]:
        wanted = [condition for condition in conditions if condition.side in sides]
        return _at(case, base, wanted, bench, factor, advance)

    def holding(points: Sequence[AtRate]) -> dict[Side | None, bool]:
        found: dict[Side | None, bool] = {}
        for point in points:
            holds = all(one.holds(point.values) for one in case.objectives)
            found[point.condition.side] = holds and found.get(point.condition.side, True)
        return found

    points = tried(1.0, [condition.side for condition in conditions])
    at_once = holding(points)
    for factors, until in ((UPWARDS, False), (DOWNWARDS, True)):
        left = [side for side, holds in at_once.items() if holds is not until]
        for factor in factors:
            if not left or (factors is UPWARDS and None not in left):
                break
            here = tried(factor, left)
            points += here
            left = [side for side, holds in holding(here).items() if holds is not until]
    return sorted(points, key=lambda point: (point.factor, conditions.index(point.condition)))


def _at(
    case: Candidates,
    base: Scenario,
    conditions: Sequence[Condition],
    bench: Bench,
    factor: float,
    advance: Advance | None,
) -> list[AtRate]:
    scenario = base if factor == 1.0 else at_rate(base, factor)
    assert scenario is not None
    jobs = {one: case.job_of(case.tried(scenario, one)) for one in conditions}
    failed = bench.run(jobs.values(), advance)
    if failed:
        raise RunsFailed(f"{len(failed)} runs at other rates failed: {next(iter(failed.values()))}")
    rate = rate_of(base)
    return [
        AtRate(factor, factor * rate, condition, summary, figures(summary))
        for condition, job in jobs.items()
        for summary in [bench.done[job.digest]]
    ]
