"""Measured against predicted, figure by figure and request by request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from simkv.proof.validation.case import METRICS, Case, Origin
from simkv.proof.validation.replay import Replayed

Floats = npt.NDArray[np.float64]
STATISTICS = ("mean", "p50", "p90", "p95", "p99")
#: As the originating projects call metrics and statistics.
_ORIGIN = {
    "ttft_ms": "TTFT",
    "tpot_ms": "TPOT",
    "e2e_ms": "Latency",
    "mean": "Mean",
    "p50": "Median",
    "p90": "P90",
    "p95": "P95",
    "p99": "P99",
}


@dataclass(frozen=True)
class Figure:
    """One statistic of one metric over the scored requests (ms, or s for the makespan).

    ``origin_pct`` is the error that the originating simulator publishes, in per cent.
    """

    metric: str
    statistic: str
    measured: float
    predicted: float
    origin_pct: float | None = None

    @property
    def error_pct(self) -> float:
        """(predicted - measured) / measured, in per cent; 0 where both are 0."""
        if self.measured == 0:
            return 0.0 if self.predicted == 0 else float("inf")
        return 100 * (self.predicted / self.measured - 1)


@dataclass(frozen=True)
class PerRequest:
    """Errors request by request: mean and median of the absolute ones.

    In per cent, and in ms; per cent are None for times that may be zero (queueing).
    """

    metric: str
    requests: int
    mape: float | None
    median_ape: float | None
    mae_ms: float
    origin_mape: float | None = None


@dataclass(frozen=True)
class Score:
    """A recorded run against its simulation."""

    case: Case
    replayed: Replayed
    profile: str
    figures: list[Figure]
    per_request: list[PerRequest]
    stages: dict[str, list[Figure]]

    def has(self, metric: str) -> bool:
        """Whether a metric was compared: recorded for some request, and not empty for all."""
        return any(f.metric == metric for f in self.figures)

    def figure(self, metric: str, statistic: str) -> Figure:
        """One figure. Raises StopIteration if it was not compared."""
        return next(f for f in self.figures if (f.metric, f.statistic) == (metric, statistic))


def score(case: Case, replayed: Replayed, profile: str) -> Score:
    """Compare a simulation with the record, over the requests that are scored."""
    origin = case.facts.origin_simulator
    kept = case.scored.to_numpy()
    figures = [
        Figure(metric, statistic, measured, predicted, _published(origin, metric, statistic))
        for metric in METRICS
        for statistic, measured, predicted in _compared(case, replayed, metric, kept)
    ]
    figures.append(Figure("makespan_s", "", case.makespan_s, replayed.makespan_s))
    if case.facts.preemptions is not None:
        counts = float(case.facts.preemptions), float(replayed.preemptions)
        figures.append(Figure("preemptions", "", *counts))
    per_request = [
        found
        for metric in METRICS
        if (found := _per_request(case, replayed, metric, kept, origin)) is not None
    ]
    stages = {}
    if "stage" in case.requests:
        names = case.requests["stage"][case.scored].unique()
        for name in names:
            of_stage = kept & (case.requests["stage"] == name).to_numpy()
            stages[str(name)] = [
                Figure(metric, statistic, measured, predicted)
                for metric in METRICS
                for statistic, measured, predicted in _compared(case, replayed, metric, of_stage)
            ]
    return Score(case, replayed, profile, figures, per_request, stages)


def _both(
    case: Case, replayed: Replayed, metric: str, kept: npt.NDArray[np.bool_]
) -> tuple[Floats, Floats]:
    measured = case.requests[metric].to_numpy(dtype=np.float64)
    predicted = replayed.requests[metric].to_numpy(dtype=np.float64)
    there = kept & np.isfinite(measured) & np.isfinite(predicted)
    return measured[there], predicted[there]


def _compared(
    case: Case, replayed: Replayed, metric: str, kept: npt.NDArray[np.bool_]
) -> list[tuple[str, float, float]]:
    measured, predicted = _both(case, replayed, metric, kept)
    if not len(measured):
        return []
    return list(zip(STATISTICS, _statistics(measured), _statistics(predicted), strict=True))


def _statistics(values: Floats) -> list[float]:
    return [float(values.mean()), *map(float, np.percentile(values, (50, 90, 95, 99)))]


def _per_request(
    case: Case,
    replayed: Replayed,
    metric: str,
    kept: npt.NDArray[np.bool_],
    origin: Origin,
) -> PerRequest | None:
    measured, predicted = _both(case, replayed, metric, kept)
    if not len(measured):
        return None
    off = np.abs(predicted - measured)
    published = origin.recomputed_from_committed_sim_csv.get(metric)
    theirs = published.get("per_request_mape_pct") if isinstance(published, dict) else None
    if metric == "queue_ms":
        return PerRequest(metric, len(measured), None, None, float(off.mean()))
    above = measured > 0
    apart = 100 * off[above] / measured[above]
    if not len(apart):
        return PerRequest(metric, len(measured), None, None, float(off.mean()))
    return PerRequest(
        metric,
        len(measured),
        float(apart.mean()),
        float(np.median(apart)),
        float(off.mean()),
        _number(theirs),
    )


def _published(origin: Origin, metric: str, statistic: str) -> float | None:
    return _number(origin.published.get(f"{_ORIGIN.get(metric)} {_ORIGIN[statistic]}"))


def _number(found: Any) -> float | None:
    return float(found) if isinstance(found, int | float) else None
