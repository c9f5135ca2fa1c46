"""Compare measured and predicted values, by metric and by request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from simkv.costs.cost_profile import CostProfile
from simkv.costs.profile_uncertainty import MAX_UNKNOWN_SHARE
from simkv.metrics.fidelity import scaled_executors
from simkv.schedulers.vllm.config import VllmConfig
from simkv.validation.figure_comparison import JUDGED_MODEL, FigureComparison
from simkv.validation.recorded_runs.published_statistics import METRICS, STATISTICS
from simkv.validation.recorded_runs.recorded_run import Origin, RecordedRun
from simkv.validation.recorded_runs.run_simulation import SimulatedRun, simulate_run

Floats = npt.NDArray[np.float64]
#: Names of metrics and statistics in the projects that published the runs.
_ORIGIN_METRICS = {"ttft_ms": "TTFT", "tpot_ms": "TPOT", "e2e_ms": "Latency"}
_ORIGIN = {"mean": "Mean", "p50": "Median", "p90": "P90", "p95": "P95", "p99": "P99"}


@dataclass(frozen=True)
class RequestErrors:
    """Errors of one metric over single requests.

    The errors are the mean and the median of the absolute errors, in percent and in ms. Errors in
    percent are None for times that may be zero (queueing).
    """

    metric: str
    requests: int
    mape: float | None
    median_ape: float | None
    mae_ms: float
    origin_mape: float | None = None


@dataclass(frozen=True)
class Score:
    """Comparison of a recorded run with its simulation.

    Errors are given for all scored requests and by stage of the run. ``published`` contains the
    errors (percent) that the authors of the record published for their own simulator.
    ``fitted_to_itself`` is true if the costs come from isolated requests of the run.
    """

    case: RecordedRun
    replayed: SimulatedRun
    profile: str
    figures: list[FigureComparison]
    per_request: list[RequestErrors]
    stages: dict[str, list[FigureComparison]]
    published: dict[str, float]
    fitted_to_itself: bool = False

    def has(self, metric: str) -> bool:
        """Return whether a metric was compared, which requires recorded values."""
        return any(f.metric == metric for f in self.figures)

    def figure(self, metric: str, statistic: str) -> FigureComparison:
        """Return the comparison of one statistic. Raises StopIteration if it was not compared."""
        return next(f for f in self.figures if f.name == f"{metric}.{statistic}")

    def errors(self, metric: str, *statistics: str) -> list[str]:
        """Return the signed errors of some statistics of a metric in percent, as texts.

        The text is empty for statistics that were not compared.
        """
        known = {f.name: f.error_pct for f in self.figures}
        names = [f"{metric}.{statistic}" for statistic in statistics]
        return [f"{known[name]:+.2f}" if name in known else "" for name in names]


def simulate_and_score(
    case: RecordedRun, profile: CostProfile, config: VllmConfig, notes: list[str]
) -> Score:
    """Simulate a recorded run and compare the result with the record.

    Each metric gets an interval from the profile's error, unless the error is unknown for more than
    ``MAX_UNKNOWN_SHARE`` of the run.
    """
    replayed = simulate_run(case, profile, config, notes)
    own = case.has_isolated_requests and profile.name.startswith(case.name)
    found = replace(score(case, replayed, profile.name), fitted_to_itself=own)
    if not profile.fit.held_out or replayed.unknown > MAX_UNKNOWN_SHARE:
        return found
    others = [
        score(case, simulate_run(case, profile, config, notes, changed), profile.name)
        for changed in scaled_executors(profile)
    ]
    runs = [{f.name: f.predicted for f in run.figures} for run in (found, *others)]
    return replace(
        found,
        figures=[
            replace(f, interval=_ends([run.get(f.name) for run in runs])) for f in found.figures
        ],
    )


def _ends(values: Sequence[float | None]) -> tuple[float, float] | None:
    """Return the smallest and the largest value of a metric, or None if a run has no sample of
    it.
    """
    known = [value for value in values if value is not None]
    return (min(known), max(known)) if len(known) == len(values) else None


def score(case: RecordedRun, replayed: SimulatedRun, profile: str) -> Score:
    """Compare a simulation with the record, for the scored requests."""
    kept = case.scored.to_numpy()
    figures = _figures_told(case, replayed) if case.told else _figures(case, replayed, kept)
    if case.makespan_s is not None:
        figures.append(_figure("makespan_s", case.makespan_s, replayed.makespan_s))
    if case.facts.preemptions is not None:
        figures.append(_figure("preemptions", case.facts.preemptions, replayed.preemptions))
    per_request = [
        found
        for metric in METRICS
        if (found := _per_request(case, replayed, metric, kept)) is not None
    ]
    stages = {}
    if "stage" in case.requests:
        for name in case.requests["stage"][case.scored].unique():
            of_stage = kept & (case.requests["stage"] == name).to_numpy()
            stages[str(name)] = _figures(case, replayed, of_stage)
    published = _published(case.facts.origin_simulator)
    return Score(case, replayed, profile, figures, per_request, stages, published)


def _figure(name: str, measured: float, predicted: float) -> FigureComparison:
    return FigureComparison(name, float(measured), {JUDGED_MODEL: float(predicted)})


def _figures(
    case: RecordedRun, replayed: SimulatedRun, kept: npt.NDArray[np.bool_]
) -> list[FigureComparison]:
    """Return all statistics of the recorded metrics over the requests in the mask ``kept``."""
    found = []
    for metric in METRICS:
        both = _both(case, replayed, metric, kept)
        if len(both[0]):
            values = zip(STATISTICS, *map(_statistics, both), strict=True)
            found += [_figure(f"{metric}.{name}", *two) for name, *two in values]
    return found


def _figures_told(case: RecordedRun, replayed: SimulatedRun) -> list[FigureComparison]:
    """Return the published statistics, compared with the statistics of all simulated requests."""
    found = []
    for metric in METRICS:
        times = replayed.requests[metric].dropna().to_numpy(dtype=np.float64)
        if not len(times):
            continue
        predicted = dict(zip(STATISTICS, _statistics(times), strict=True))
        names = [n for n in STATISTICS if f"{metric}.{n}" in case.told]
        found += [_figure(f"{metric}.{n}", case.told[f"{metric}.{n}"], predicted[n]) for n in names]
    return found


def _both(
    case: RecordedRun, replayed: SimulatedRun, metric: str, kept: npt.NDArray[np.bool_]
) -> tuple[Floats, Floats]:
    measured = case.requests[metric].to_numpy(dtype=np.float64)
    predicted = replayed.requests[metric].to_numpy(dtype=np.float64)
    there = kept & np.isfinite(measured) & np.isfinite(predicted)
    return measured[there], predicted[there]


def _statistics(values: Floats) -> list[float]:
    return [float(values.mean()), *map(float, np.percentile(values, (50, 90, 95, 99)))]


def _per_request(
    case: RecordedRun, replayed: SimulatedRun, metric: str, kept: npt.NDArray[np.bool_]
) -> RequestErrors | None:
    measured, predicted = _both(case, replayed, metric, kept)
    if not len(measured):
        return None
    off = np.abs(predicted - measured)
    mean_ms = float(off.mean())
    above = measured > 0
    apart = 100 * off[above] / measured[above]
    if metric == "queue_ms" or not len(apart):
        return RequestErrors(metric, len(measured), None, None, mean_ms)
    published = case.facts.origin_simulator.recomputed_from_committed_sim_csv.get(metric)
    theirs = published.get("per_request_mape_pct") if isinstance(published, dict) else None
    shares = float(apart.mean()), float(np.median(apart))
    return RequestErrors(metric, len(measured), *shares, mean_ms, _number(theirs))


def _published(origin: Origin) -> dict[str, float]:
    """Return the errors that the authors of the record published for their simulator, by metric
    name.
    """
    named = {
        f"{metric}.{statistic}": _number(origin.published.get(f"{theirs} {_ORIGIN[statistic]}"))
        for metric, theirs in _ORIGIN_METRICS.items()
        for statistic in STATISTICS
    }
    return {name: error for name, error in named.items() if error is not None}


def _number(found: Any) -> float | None:
    return float(found) if isinstance(found, int | float) else None
