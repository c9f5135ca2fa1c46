"""Reports of guidellm with several loads, or without single requests.

A report has one benchmark per load. ``strategy`` of a benchmark states the load: ``constant`` or
``poisson`` with ``rate``, ``concurrent`` with ``streams``, ``synchronous``, or ``throughput`` with
``max_concurrency``. ``metrics`` has the mean, the median and the percentiles of each latency of
successful requests (guidellm 0.2 to 0.8, ``benchmark/schemas``). guidellm's inter-token latency of
a request is its TPOT.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from simkv.core.errors import InputError

#: Latencies by guidellm's name: simkv's name and the number of ms in guidellm's unit.
_LATENCIES = {
    "time_to_first_token_ms": ("ttft_ms", 1.0),
    "inter_token_latency_ms": ("tpot_ms", 1.0),
    "request_latency": ("e2e_ms", 1e3),
}
_STATISTICS = ("mean", "median")
_PERCENTILES = ("p90", "p95", "p99")
#: Burstiness of arrivals at a constant rate, whose gaps are nearly equal.
CONSTANT = 1e4


@dataclass(frozen=True)
class GuidellmLoad:
    """Load of a benchmark in a report, and its metrics.

    ``name`` describes the load. ``arrivals`` has fields of ``ScenarioOptions`` that describe the
    arrivals. ``figures`` are the metrics, named as in ``summary.json``. ``lengths`` are the mean
    numbers of prompt and output tokens. ``has_requests`` is true if the report has single requests.
    """

    name: str
    requests: int
    arrivals: dict[str, float]
    figures: dict[str, float]
    lengths: tuple[float, float]
    has_requests: bool


def read_loads(path: Path, text: str) -> list[GuidellmLoad]:
    """Return the loads of a report; the list is empty if the file is not a report of guidellm.

    Raises InputError if a benchmark has no successful request.
    """
    if '"benchmarks"' not in text:
        return []
    try:
        report = json.loads(text)
    except (ValueError, RecursionError):
        return []
    parts = report.get("benchmarks") if isinstance(report, dict) else None
    if not isinstance(parts, list) or not all(_get(part, "metrics") for part in parts):
        return []
    return [_load(f"{path}: benchmarks[{index}]", part) for index, part in enumerate(parts)]


def _load(place: str, benchmark: dict[str, Any]) -> GuidellmLoad:
    metrics = benchmark["metrics"]
    count = _number(metrics, "request_latency", "successful", "count")
    if not count:
        raise InputError(f"{place}: contains no successful request")
    lengths = [
        _number(metrics, f"{side}_token_count", "successful", "mean")
        for side in ("prompt", "output")
    ]
    name, arrivals = _arrivals(benchmark)
    figures = dict(_figures(metrics))
    seconds = _number(benchmark, "duration") or (
        (_number(benchmark, "end_time") or 0.0) - (_number(benchmark, "start_time") or 0.0)
    )
    if seconds > 0 and lengths[1]:
        figures["output_throughput"] = count * lengths[1] / seconds
    return GuidellmLoad(
        name,
        int(count),
        arrivals,
        figures,
        (lengths[0] or 1.0, lengths[1] or 1.0),
        bool(_get(benchmark, "requests", "successful")),
    )


def _arrivals(benchmark: dict[str, Any]) -> tuple[str, dict[str, float]]:
    """Return a description of the load, and the fields of ``ScenarioOptions`` for its arrivals."""
    places = ("config", "args", "scheduler")
    found: dict[str, Any] = next(
        (s for place in places if (s := _get(benchmark, place, "strategy"))), {}
    )
    kind = str(_get(found, "type_") or "unknown")
    if kind == "synchronous":
        return kind, {"max_concurrency": 1}
    if streams := _number(found, "streams"):
        return f"{kind}, {streams:g} streams", {"max_concurrency": int(streams)}
    if kind == "throughput":
        most = _number(found, "max_concurrency")
        return kind, {"max_concurrency": int(most)} if most else {}
    if rate := _number(found, "rate"):
        smooth = {"burstiness": CONSTANT} if kind == "constant" else {}
        return f"{kind}, {rate:g} req/s", {"request_rate": rate, **smooth}
    return kind, {}


def _figures(metrics: dict[str, Any]) -> Iterator[tuple[str, float]]:
    for theirs, (ours, unit) in _LATENCIES.items():
        for statistic in _STATISTICS:
            if value := _number(metrics, theirs, "successful", statistic):
                yield f"{ours}.{statistic}", unit * value
        for percentile in _PERCENTILES:
            if value := _number(metrics, theirs, "successful", "percentiles", percentile):
                yield f"{ours}.{percentile}", unit * value


def _get(tree: Any, *names: str) -> Any:
    """Return the value at a path of keys in nested objects, or None."""
    for name in names:
        tree = tree.get(name) if isinstance(tree, dict) else None
    return tree


def _number(tree: Any, *names: str) -> float | None:
    """Return the value at a path of keys if it is a finite number above 0, or None."""
    value = _get(tree, *names)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if 0 < value < math.inf else None
