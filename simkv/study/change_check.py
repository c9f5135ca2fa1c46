"""Compare two deployments on the same requests: which requests get worse, and by how much.

Both deployments are simulated with the same seeds and the same errors of step times, so that common
variation cancels out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from simkv.core.errors import InputError
from simkv.core.figure_registry import METRICS, figure
from simkv.core.outcome import Outcome
from simkv.costs.scaled_executor import ErrorSide
from simkv.scenario.scenario import Scenario, StepScale
from simkv.scenario.scenario_costs import list_replica_costs
from simkv.study.job_runner import open_pooled_runner
from simkv.study.plan.plan_confidence import ProfileError, find_profile_error
from simkv.study.random_seeds import find_seed, reseed_scenario
from simkv.study.simulation_job import RunsFailed, SimulationJob, Summary, make_job

#: Metrics that decide: latencies of all requests, time per token, and throughput.
FIGURES = (
    "ttft_all_ms.mean",
    "ttft_all_ms.p99",
    "tpot_ms.mean",
    "e2e_all_ms.mean",
    "e2e_all_ms.p99",
    "output_throughput",
    "finished",
)
#: Smallest change of a request's latency that counts (s).
LEAST_CHANGE_S = 0.01


@dataclass(frozen=True)
class FigureChange:
    """Mean of a metric over all seeds, before and after a change, and the relative difference.

    ``low`` and ``high`` are the smallest and the largest difference over all seeds and step-time
    errors.
    """

    name: str
    before: float
    after: float
    change: float
    low: float
    high: float

    @property
    def most_worse(self) -> float:
        """Largest relative deterioration from ``low`` to ``high``, or 0."""
        return max(-self.low if METRICS[self.name].more_is_better else self.high, 0.0)

    @property
    def least_worse(self) -> float:
        """Smallest relative deterioration from ``low`` to ``high``; 0 if the range includes an
        improvement.
        """
        return max(-self.high if METRICS[self.name].more_is_better else self.low, 0.0)


@dataclass(frozen=True)
class RequestChange:
    """A request whose latency or outcome changes.

    ``before`` and ``after`` are its latencies in seconds, or None if it did not finish.
    """

    id: int
    before: float | None
    after: float | None
    outcome_before: str
    outcome_after: str

    @property
    def failed(self) -> bool:
        """Whether the request finishes without the change but not with it."""
        return self.outcome_before == Outcome.FINISHED and self.outcome_after != Outcome.FINISHED

    @property
    def seconds(self) -> float:
        """Change of the latency in seconds, or infinity if the request no longer finishes."""
        if self.before is None or self.after is None:
            return float("inf") if self.failed else float("-inf")
        return self.after - self.before


@dataclass(frozen=True)
class ChangeCheck:
    """Result of a comparison of two deployments.

    ``worse`` and ``better`` list the requests that get worse or better in the runs with the first
    seed. The largest change comes first.
    """

    figures: tuple[FigureChange, ...]
    worse: tuple[RequestChange, ...]
    better: tuple[RequestChange, ...]
    requests: int
    seeds: int
    with_errors: bool

    def beyond(self, tolerance: float) -> list[FigureChange]:
        """Return the metrics that get worse by more than ``tolerance`` (a fraction) in all runs."""
        return [one for one in self.figures if one.least_worse > tolerance]

    def unsure(self, tolerance: float) -> list[FigureChange]:
        """Return the metrics that get worse by more than ``tolerance`` (a fraction) in some runs,
        but not in all.
        """
        return [one for one in self.figures if one.most_worse > tolerance >= one.least_worse]


def check_change(
    before: Scenario,
    after: Scenario,
    folder: Path,
    *,
    seeds: int = 1,
    tolerance: float = 0.05,
    jobs: int | None = None,
    advance: Callable[[int, int], None] | None = None,
) -> ChangeCheck:
    """Simulate both scenarios with each seed and each step-time error, and compare the results.

    ``tolerance`` is the fraction by which the latency of a request may grow. Raises InputError if
    several seeds are given and nothing in the scenario is random. Raises RunsFailed if a run fails.
    """
    if seeds > 1 and find_seed(before.workload) is None:
        raise InputError(
            f"--seeds {seeds}: the workload has no random part, so all seeds would give the "
            "same result; expected 1"
        )
    folder = folder.resolve()
    pair = [(one, _error(one, folder)) for one in (before, after)]
    known = all(error.factors or error.own for _, error in pair)
    sides: tuple[ErrorSide | None, ...] = (None, "faster", "slower") if known else (None,)
    conditions = [(repeat, side) for repeat in range(seeds) for side in sides]
    planned = [
        [_job(one, error, folder, repeat, side) for one, error in pair]
        for repeat, side in conditions
    ]
    with open_pooled_runner(None, jobs) as runner:
        failed = runner.run([job for both in planned for job in both], advance)
        for failure in failed.values():
            raise failure if isinstance(failure, InputError) else RunsFailed(str(failure))
        found = [(runner.done[one.digest], runner.done[other.digest]) for one, other in planned]
    nominal = [both for both, (_, side) in zip(found, conditions, strict=True) if side is None]
    figures = [_figure_change(name, nominal, found) for name in FIGURES]
    changed = _requests(*nominal[0], tolerance)
    return ChangeCheck(
        tuple(one for one in figures if one is not None),
        tuple(one for one in changed if one.seconds > 0),
        tuple(reversed([one for one in changed if one.seconds < 0])),
        len(nominal[0][0]["endings"]),
        seeds,
        known,
    )


def _error(scenario: Scenario, folder: Path) -> ProfileError:
    profile = next(costs for _, costs in list_replica_costs(scenario)).load(folder)
    return find_profile_error(profile, None)


def _job(
    scenario: Scenario, error: ProfileError, folder: Path, repeat: int, side: ErrorSide | None
) -> SimulationJob:
    seeded = reseed_scenario(scenario, repeat)
    if side is not None:
        own = seeded.step_scale or StepScale()
        change: dict[str, Any] = {"error": side}
        if not error.own:
            change = {kind: getattr(own, kind) * by for kind, by in error.factors[side].items()}
        seeded = seeded.model_copy(update={"step_scale": own.model_copy(update=change)})
    return make_job(seeded, folder, endings=True)


def _figure_change(
    name: str, nominal: Sequence[tuple[Summary, Summary]], all_: Sequence[tuple[Summary, Summary]]
) -> FigureChange | None:
    """Return the change of a metric, or None if it has no sample in a run or is always 0 before."""

    def values(pairs: Sequence[tuple[Summary, Summary]]) -> list[tuple[float, float]]:
        return [(figure(one, name), figure(other, name)) for one, other in pairs]

    every = values(all_)
    if any(value is None for both in every for value in both) or not any(a for a, _ in every):
        return None
    changes = [_relative(a, b) for a, b in every]
    before, after = (fmean(column) for column in zip(*values(nominal), strict=True))
    return FigureChange(name, before, after, _relative(before, after), min(changes), max(changes))


def _relative(before: float, after: float) -> float:
    return (after - before) / before if before else (0.0 if after == before else float("inf"))


def _requests(
    before: Mapping[str, Any], after: Mapping[str, Any], tolerance: float
) -> list[RequestChange]:
    """Return the requests whose latency or outcome changes, the largest deterioration first."""
    ours = {row[0]: row for row in before["endings"]}
    found = []
    for number, outcome, latency in after["endings"]:
        _, earlier, took = ours[number]
        one = RequestChange(number, took, latency, earlier, outcome)
        limit = max(LEAST_CHANGE_S, tolerance * (took or 0.0))
        if earlier != outcome or (took is not None and abs(one.seconds) > limit):
            found.append(one)
    return sorted(found, key=lambda one: -one.seconds)
