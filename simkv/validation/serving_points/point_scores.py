"""Score predictions against measurements by group, and score other tools on the same measurements.

Every measurement counts once, even if it is listed several times. Values are fractions, not
percent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import combinations

import numpy as np

from simkv.core.errors import InputError
from simkv.costs.hardware.model_gpu_catalog import find_architecture
from simkv.validation.serving_points.measured_rows import OTHER_TOOLS, Latency, MeasuredRow
from simkv.validation.serving_points.point_prediction import Prediction

#: Measured latencies.
LATENCY_NAMES = ("ttft", "tpot")
#: Scored metrics. ``throughput`` is output tokens per second of the closed loop, computed from TTFT
#: and TPOT for prediction and measurement, because the rows have no measured throughput.
METRIC_NAMES = (*LATENCY_NAMES, "throughput")
#: Fraction of measurements that should lie outside an interval.
OUTSIDE = 0.1


@dataclass(frozen=True)
class LatencyErrors:
    """Errors of one metric in a group of predictions.

    ``mape`` is the mean absolute error of all rows with a prediction. ``strict`` is the mean over
    all rows, with an error of 1 for a missing prediction. ``bias`` is the median of the signed
    error. ``coverage`` is the fraction of intervals that contain the measurement. ``width`` is half
    the width of an interval relative to the prediction (median). ``interval_score`` is the mean
    score of the intervals (see ``interval_scores``). ``coverage``, ``width`` and ``interval_score``
    are None without intervals. ``anchors`` has ``mape`` and ``strict`` of each other tool on the
    same rows.
    """

    mape: float
    strict: float
    bias: float
    coverage: float | None
    width: float | None
    interval_score: float | None = None
    anchors: dict[str, tuple[float, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class GroupScore:
    """Scores of a group of ``rows`` rows with ``measurements`` distinct measurements.

    ``answered`` is the fraction of measurements with a prediction. ``errors`` contains the errors
    by metric.
    """

    name: str
    rows: int
    measurements: int
    answered: float
    errors: dict[str, LatencyErrors]


def is_trusted(prediction: Prediction) -> bool:
    """Return whether the configuration in a row is not marked as suspect."""
    return not prediction.row.suspect


def score_groups(predictions: Sequence[Prediction]) -> dict[str, list[GroupScore]]:
    """Return the scores of groups of predictions. The predictions are grouped in several ways.

    The keys of the result describe the groupings, such as ``class``.

    Rows with a suspect configuration have separate groups.
    """
    measured = [p for p in predictions if p.row.measured]
    trusted = [p for p in measured if is_trusted(p)]
    groupings: dict[str, Callable[[Prediction], str]] = {
        "class": lambda p: class_of(p.row),
        "model and GPU": lambda p: " ".join(
            (p.row.backend, p.row.model.rsplit("/", 1)[-1], p.row.system, p.row.precision)
        ),
        "how it was run": lambda p: p.row.protocol or "not said",
    }
    found = {name: _grouped(trusted, key) for name, key in groupings.items()}
    if relabelled := [p for p in trusted if p.row.parallel_note]:
        found["corrected labels"] = _grouped(relabelled, lambda p: p.row.parallel_note)
    if suspect := [p for p in measured if not is_trusted(p)]:
        found["suspect, apart"] = _grouped(suspect, lambda p: p.row.suspect)
    return found


def class_of(row: MeasuredRow) -> str:
    """Return the class of a row: the engine and the kind of model. Accuracy targets refer to these
    classes.
    """
    if row.backend == "sglang":
        return "SGLang"
    try:
        return "MoE on vLLM" if find_architecture(row.model).experts else "dense on vLLM"
    except InputError:
        return "unknown model on vLLM"


def _grouped(
    predictions: Sequence[Prediction], key: Callable[[Prediction], str]
) -> list[GroupScore]:
    groups: dict[str, list[Prediction]] = {}
    for prediction in predictions:
        groups.setdefault(key(prediction), []).append(prediction)
    return [score_group(name, groups[name]) for name in sorted(groups)]


def score_group(name: str, predictions: Sequence[Prediction]) -> GroupScore:
    """Return the scores of a group of predictions. Every row must have a measurement."""
    weights = weigh([p.row for p in predictions])
    answered = np.array([p.latency is not None for p in predictions])
    return GroupScore(
        name,
        len(predictions),
        len({p.row.measurement for p in predictions}),
        float(weights[answered].sum() / weights.sum()),
        {n: _errors(predictions, weights, index) for index, n in enumerate(METRIC_NAMES)},
    )


def weigh(rows: Sequence[MeasuredRow]) -> np.ndarray:
    """Return the weight of each row.

    The rows of a measurement that is listed several times have a total weight of 1.
    """
    times: dict[str, int] = {}
    for row in rows:
        times[row.measurement] = times.get(row.measurement, 0) + 1
    return np.array([1.0 / times[row.measurement] for row in rows])


def _errors(predictions: Sequence[Prediction], weights: np.ndarray, index: int) -> LatencyErrors:
    real = np.array([_value(p.row, p.row.measured, index) for p in predictions])
    found = np.array([_value(p.row, p.latency, index) for p in predictions])
    low = np.array([_value(p.row, p.low, index) for p in predictions])
    high = np.array([_value(p.row, p.high, index) for p in predictions])
    low, high = np.minimum(low, high), np.maximum(low, high)
    signed = found / real - 1.0
    told = ~np.isnan(low)
    anchors = {}
    for tool in OTHER_TOOLS:
        other = np.array([_value(p.row, p.row.anchors.get(tool), index) for p in predictions])
        if not np.isnan(other).all():
            anchors[tool] = _mape(other / real - 1.0, weights)
    mape, strict = _mape(signed, weights)
    inside = (low <= real) & (real <= high)
    scores = interval_scores(low, high, real)
    return LatencyErrors(
        mape,
        strict,
        weighted_quantile(signed, weights, 0.5),
        float(weights[told & inside].sum() / weights[told].sum()) if told.any() else None,
        weighted_quantile((high - low) / 2.0 / found, weights, 0.5) if told.any() else None,
        float(np.average(scores[told], weights=weights[told])) if told.any() else None,
        anchors,
    )


def interval_scores(low: np.ndarray, high: np.ndarray, real: np.ndarray) -> np.ndarray:
    """Return the score of each interval, divided by the measured value. Lower is better.

    Source: Gneiting and Raftery 2007, section 6.2, with the level ``OUTSIDE``.
    """
    missed = np.maximum(low - real, 0.0) + np.maximum(real - high, 0.0)
    return np.asarray((high - low + 2.0 / OUTSIDE * missed) / real)


def _value(row: MeasuredRow, latency: Latency | None, index: int) -> float:
    if latency is None:
        return math.nan
    if METRIC_NAMES[index] != "throughput":
        return latency[index]
    e2e_ms = latency.ttft + (row.osl - 1) * latency.tpot
    return 1e3 * row.concurrency * row.osl / e2e_ms


def _mape(signed: np.ndarray, weights: np.ndarray) -> tuple[float, float]:
    """Return the mean absolute error over rows with a prediction, and over all rows.

    In the second mean, a row without a prediction counts as an error of 1.
    """
    there = ~np.isnan(signed)
    if not there.any():
        return math.nan, 1.0
    strict = np.where(there, np.abs(signed), 1.0)
    answered = np.average(np.abs(signed[there]), weights=weights[there])
    return float(answered), float(np.average(strict, weights=weights))


def weighted_quantile(values: np.ndarray, weights: np.ndarray, share: float) -> float:
    """Return the quantile ``share`` (0 to 1) of weighted ``values``. NaN values are ignored."""
    there = ~np.isnan(values)
    if not there.any():
        return math.nan
    order = np.argsort(values[there], kind="stable")
    ends = np.cumsum(weights[there][order])
    place = int(np.searchsorted(ends, share * ends[-1]))
    return float(values[there][order][min(place, len(order) - 1)])


@dataclass(frozen=True)
class Noise:
    """Relative difference between two measurements of the same configuration.

    The difference is the median over ``pairs`` pairs.
    """

    name: str
    pairs: int
    ttft: float
    tpot: float


def noise(rows: Iterable[MeasuredRow]) -> list[Noise]:
    """Return the measurement noise by engine, for pairs of the same release and of different
    releases.
    """
    once = {row.measurement: row for row in rows if row.measured and not row.suspect}
    groups: dict[tuple[str | int, ...], list[MeasuredRow]] = {}
    for row in once.values():
        groups.setdefault(row.configuration, []).append(row)
    found: dict[str, list[tuple[float, float]]] = {}
    for group in groups.values():
        for a, b in combinations(group, 2):
            same = "same release" if a.version == b.version else "another release"
            assert a.measured
            assert b.measured
            first, second = (
                abs(x - y) / ((x + y) / 2) for x, y in zip(a.measured, b.measured, strict=True)
            )
            found.setdefault(f"{a.backend}, {same}", []).append((first, second))
    return [
        Noise(name, len(pairs), *(float(np.median(column)) for column in zip(*pairs, strict=True)))
        for name, pairs in sorted(found.items())
    ]
