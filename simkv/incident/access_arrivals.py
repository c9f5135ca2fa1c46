"""Arrival times of requests, derived from the access lines of a log.

Uvicorn writes an access line when a response starts. A streamed response starts at the arrival of
the request, and any other response at its end. The statistics lines, with the number of requests in
the system, show whether access lines mark arrivals or ends: the resulting numbers of arrivals and
of finished requests never decrease.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pandas as pd

from simkv.incident.evidence import sum_over_ranks

Floats = npt.NDArray[np.float64]


def arrivals_from_access(
    access: pd.DataFrame, series: pd.DataFrame, seed: int, *, initial: int = 0
) -> tuple[pd.DataFrame, int]:
    """Return a table of arrivals, and the number of requests in the system at the start of the log.

    Arrival times are sampled uniformly from the interval before each access line.
    """
    summed = sum_over_ranks(series)[["running", "waiting"]].sum(axis="columns")
    at, present = summed.index.to_numpy(np.float64), summed.to_numpy(np.float64)
    rows = access[access["accepted"] + access["failed"] > 0]
    counts = (rows["accepted"] + rows["failed"]).to_numpy(np.int64)
    end = rows["t_s"].fillna(at[0]).to_numpy(np.float64)
    # The first interval begins with the log; a statistics line covers no more than its own
    # interval.
    gap = float(np.median(np.diff(at))) if len(at) > 1 else 10.0
    start = rows["from_s"].to_numpy(np.float64)
    start = np.where(np.isnan(start), end - gap, start)
    start = np.where(start < end, np.maximum(start, end - max(gap, 1.0)), start)
    luck = np.random.default_rng(seed)
    which = np.repeat(np.arange(len(counts)), counts)
    times = np.sort(start[which] + luck.random(len(which)) * (end - start)[which])
    logged = np.searchsorted(times, at, "right").astype(np.float64)
    if _are_completions(logged, present):
        times = _with_remaining(at, logged + present, luck)
        logged = np.searchsorted(times, at, "right").astype(np.float64)
    already = max(int((present - logged).max()), initial) if len(at) else initial
    first = min(float(at[0]) - gap, float(times[0]) if len(times) else float(at[0]))
    # Little's law gives the time in the system; a uniformly distributed part of it is before the
    # log.
    spent = float(present.sum()) * gap / max(len(times), 1)
    times = np.concatenate([np.sort(first - luck.random(already) * spent), times])
    table = pd.DataFrame(
        {"t_s": times, "max_tokens": 0, "prompt_tokens": 0, "gave_up_s": np.nan, "request": np.nan}
    )
    return table, already


def _are_completions(logged: Floats, present: Floats) -> bool:
    """Return whether access lines mark the ends of requests instead of their arrivals."""
    as_arrivals, as_completions = _falls(logged - present), _falls(logged + present)
    if as_arrivals == as_completions and len(logged):
        return bool(logged[0] == 0 and present[0] > 0)
    return as_completions < as_arrivals


def _falls(values: Floats) -> float:
    return float(np.maximum(-np.diff(values), 0.0).sum())


def _with_remaining(at: Floats, arrived: Floats, luck: np.random.Generator) -> Floats:
    """Return one arrival time per request. ``arrived`` is the number of arrivals until each time
    ``at``.
    """
    grown = np.maximum.accumulate(np.concatenate([[0.0], arrived]))
    new = np.diff(grown).astype(np.int64)
    gap = float(np.median(np.diff(at))) if len(at) > 1 else 10.0
    before = np.concatenate([[at[0] - gap], at[:-1]])
    which = np.repeat(np.arange(len(new)), new)
    return np.sort(before[which] + luck.random(len(which)) * (at - before)[which])
