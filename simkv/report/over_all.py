"""Latencies over all requests, so that a variant that served few does not look best."""

from __future__ import annotations

from math import fsum

from simkv.core.quantiles import quantile
from simkv.loop.record import Life, Record
from simkv.measure.metrics import e2e, ttft

#: What is given so, by its group in ``summary.json``.
OVER_ALL = {"ttft_ms": ttft, "e2e_ms": e2e}


def over_all(record: Record, group: str, statistic: str) -> tuple[float | None, bool]:
    """A latency in seconds over all requests that came, and whether it is more than that.

    Whoever never got so far counts with the time until its end. None where nobody came.
    """
    known = [OVER_ALL[group](life) for life in record.lives.values() if _came(life)]
    lives = [life for life in record.lives.values() if _came(life)]
    values = sorted(
        _lasted(life) if value is None else value for life, value in zip(lives, known, strict=True)
    )
    if not values:
        return None, False
    bound = None in known
    if statistic == "mean":
        return fsum(values) / len(values), bound
    share = {"median": 0.5}.get(statistic) or int(statistic[1:]) / 100
    return quantile(values, list(range(1, len(values) + 1)), share), bound


def _came(life: Life) -> bool:
    return life.seen is not None or _lasted(life) > 0.0


def _lasted(life: Life) -> float:
    return max((life.ended_at or 0.0) - life.request.arrival, 0.0)
