"""Runs of a scenario with several seeds, and intervals of its metrics over the seeds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from simkv.core.errors import InputError
from simkv.core.figure_registry import METRICS, figure
from simkv.metrics.run_result import RunResult
from simkv.scenario.scenario import Scenario
from simkv.study.job_runner import open_pooled_runner
from simkv.study.random_seeds import find_seed, reseed_scenario
from simkv.study.simulation_job import RunsFailed, Summary, make_job

#: Confidence level of the intervals.
CONFIDENCE = 0.9
#: Metrics that are shown with an interval.
FIGURES = (
    "ttft_ms.mean",
    "ttft_ms.p99",
    "tpot_ms.mean",
    "e2e_ms.mean",
    "e2e_ms.p99",
    "output_throughput",
    "preemptions",
)


@dataclass(frozen=True)
class SeedInterval:
    """Mean of a metric over seeds, its confidence interval, and the range of the runs."""

    mean: float
    low: float
    high: float
    least: float
    most: float

    @staticmethod
    def of(values: Sequence[float]) -> SeedInterval:
        """Return the interval of values that cannot be negative, by Student's t distribution.

        For a single value, its width is zero.
        """
        mean = fmean(values)
        half = 0.0
        if len(values) > 1:
            from scipy.special import stdtrit

            quantile = float(stdtrit(len(values) - 1, (1 + CONFIDENCE) / 2))
            half = quantile * stdev(values) / sqrt(len(values))
        return SeedInterval(mean, max(mean - half, 0.0), mean + half, min(values), max(values))


def run_seeds(
    scenario: Scenario,
    folder: Path,
    seeds: int,
    jobs: int | None = None,
    advance: Callable[..., Any] | None = None,
) -> list[Summary]:
    """Run the scenario with all seeds except its own, and return the summary of each run.

    Raises InputError if nothing in the scenario is random. Raises RunsFailed if a run fails.
    """
    if find_seed(scenario.workload) is None:
        raise InputError(
            f"--seeds {seeds}: the workload has no random part, so all seeds would give the "
            "same result; expected 1"
        )
    wanted = [
        make_job(reseed_scenario(scenario, repeat), folder.resolve()) for repeat in range(1, seeds)
    ]
    with open_pooled_runner(None, min(jobs or 1, len(wanted))) as runner:
        failed = runner.run(wanted, (lambda done, total: advance(done, total)) if advance else None)
        for error in failed.values():
            raise error if isinstance(error, InputError) else RunsFailed(str(error))
        return [runner.done[job.digest] for job in wanted]


def intervals_over_seeds(
    summaries: Sequence[Mapping[str, Any]], names: Sequence[str] = FIGURES
) -> dict[str, SeedInterval]:
    """Return the interval of each metric that all runs have."""
    found = {}
    for name in names:
        values = [figure(summary, name) for summary in summaries]
        if all(value is not None for value in values):
            found[name] = SeedInterval.of(values)
    return found


def describe_seeds(
    variant: str, result: RunResult, summaries: Sequence[Mapping[str, Any]]
) -> Iterator[str]:
    """Yield a heading and one line per metric, with two intervals.

    One interval is the spread over seeds, and the other is the error from step times.
    """
    named = "" if variant == "run" else f"{variant}, "
    yield (
        f"{named}{len(summaries)} seeds: mean with its {100 * CONFIDENCE:.0f} % interval, range "
        "over the runs, and interval due to the error of step times"
    )
    for name, one in intervals_over_seeds(summaries).items():
        metric = METRICS[name]
        show = metric.format
        costs = result.fidelity.of(name, show) or "unknown"
        yield (
            f"  {metric.label:<26} {show(one.mean)} ({show(one.low)} to {show(one.high)}); "
            f"runs {show(one.least)} to {show(one.most)}; step times: {costs}"
        )
