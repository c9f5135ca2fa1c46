"""Recorded runs with public statistics, but without times of single requests.

``measured`` in case.json has the statistics, such as ``{"ttft_ms": {"mean": 812.5, "p99":
2040.0}}``. The requests come from a ``requests.csv`` without times, or are sampled from
``arrivals``, a section as in a scenario.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from pathlib import Path
from typing import Any

import pandas as pd

from simkv.core.errors import InputError, spelling_hint
from simkv.workload.generated_requests import Arrivals

METRICS = ("ttft_ms", "tpot_ms", "e2e_ms", "queue_ms")
STATISTICS = ("mean", "p50", "p90", "p95", "p99")
#: Aliases of statistics, and statistics that are not compared.
_ALSO = {"median": "p50"}
_LEFT_OUT = ("min", "max", "std", "p75", "p25")


def read_statistics(measured: Mapping[str, Any], path: Path) -> dict[str, float]:
    """Return the statistics by metric name (``ttft_ms.p99``).

    Raises InputError with file and field if a statistic is invalid or if there is no statistic.
    """
    found = {}
    for metric, statistics in measured.items():
        if metric not in METRICS:
            raise InputError(
                f"{path}: measured: unknown metric {metric!r}{spelling_hint(metric, METRICS)}; "
                f"expected {', '.join(METRICS)}"
            )
        if not isinstance(statistics, dict):
            raise InputError(f"{path}: measured.{metric}: should be an object of statistics")
        for name, value in statistics.items():
            name = _ALSO.get(str(name).casefold(), str(name).casefold())
            if name in _LEFT_OUT:
                continue
            if name not in STATISTICS:
                raise InputError(
                    f"{path}: measured.{metric}: unknown statistic {name!r}; expected "
                    f"{', '.join(STATISTICS)}"
                )
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not isfinite(value) or value < 0:
                raise InputError(
                    f"{path}: measured.{metric}.{name}: must be a non-negative number of ms, got "
                    f"{value!r}"
                )
            found[f"{metric}.{name}"] = float(value)
    if not found:
        raise InputError(
            f"{path}: measured: missing; without times of single requests, this case needs "
            f"published statistics, such as {{'ttft_ms': {{'mean': 812.5}}}}"
        )
    return found


def sample_requests(arrivals: Arrivals) -> pd.DataFrame:
    """Return the sampled requests as rows of a ``requests.csv`` without times."""
    sent = sorted(arrivals.requests(None), key=lambda request: request.arrival)
    return pd.DataFrame(
        {
            "arrival_s": [request.arrival for request in sent],
            "prompt_tokens": [request.prompt_tokens for request in sent],
            "output_tokens": [request.output_tokens for request in sent],
        }
    )
