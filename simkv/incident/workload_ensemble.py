"""Sample workloads that match sums and histograms, without data on single requests.

Several workloads are sampled, and the observed latencies determine which are likely. The number of
arrivals between two scrapes is the number of finished requests plus the increase in requests in the
system. Arrival times are uniformly distributed, or a fraction of the requests arrives at once,
because a burst causes queueing and a steady stream does not. Lengths are sampled uniformly within
the buckets of the histogram, and moved until they match the reported sum. Arrival times are
assigned in the order of the expected arrival times: the end minus the E2E latency.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from simkv.core.errors import InputError

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
#: Number of members (the more likely half is used), and the fractions of requests between two
#: scrapes that arrive at once. The members use these fractions in turn.
MEMBERS, BURST_SHARES = 12, (0.0, 0.3, 0.6, 1.0)
#: Maximum distance of a member from the log lines, as a multiple of the smallest distance; members
#: beyond it are dropped.
MAX_DISTANCE_RATIO = 1.5
#: Upper bound of the last bucket, which is open, relative to its lower bound.
OPEN_BUCKET_FACTOR = 2.0
NEEDED = ("prompt_tokens", "output_tokens")


def can_sample(histograms: Mapping[str, Any]) -> bool:
    """Return whether there is enough data to sample requests."""
    return all(name in histograms for name in NEEDED)


def sample_workload(histograms: Mapping[str, Any], series: pd.DataFrame, seed: int) -> pd.DataFrame:
    """Return the requests of one sampled workload, with the columns of ``read_measured_latencies``.

    Raises InputError if no request ended.
    """
    luck = np.random.default_rng(seed)
    grid = np.array(histograms["t_s"])
    counts = _counts(histograms)
    if counts.sum() == 0:
        raise InputError(
            "no request ended between the first and the last scrape; expected "
            "scrapes of a server that finishes requests"
        )
    which = np.repeat(np.arange(len(grid)), counts)
    told = {name: _means(histograms, name) for name in ("ttft", "queue", "prefill", "itl", "e2e")}
    prompts = _lengths(histograms["prompt_tokens"], counts, luck)
    outputs = _lengths(histograms["output_tokens"], counts, luck)
    began = np.concatenate([[grid[0]], grid])[which]
    ended = began + luck.random(len(which)) * (grid[which] - began)
    queue = told["queue"][which]
    prefill = told["prefill"][which] * prompts / _mean_of(prompts, which, len(grid))
    first = np.where(np.isfinite(prefill), queue + prefill, told["ttft"][which])
    itl = _per_token(told, first, outputs, which)
    took = first + itl * np.maximum(outputs - 1, 0)
    took = np.where(np.isfinite(took), took, told["e2e"][which])
    order = np.argsort(ended - np.nan_to_num(took), kind="stable")
    at_once = BURST_SHARES[seed % len(BURST_SHARES)]
    arrivals = _arrivals(grid, counts, series, at_once, luck)[: len(order)]
    table = pd.DataFrame(
        {
            "t_s": np.sort(arrivals),
            "prompt_tokens": prompts[order].astype(np.int64),
            "output_tokens": outputs[order].astype(np.int64),
            "max_tokens": 0,
            "queue_ms": 1e3 * queue[order],
            "prefill_ms": 1e3 * prefill[order],
            "ttft_ms": 1e3 * first[order],
            "tpot_ms": 1e3 * np.where(outputs > 1, itl, np.nan)[order],
            "e2e_ms": 1e3 * took[order],
        }
    )
    return table.sort_values("t_s", kind="stable", ignore_index=True)


def _counts(histograms: Mapping[str, Any]) -> Ints:
    """Return the number of requests that ended in each interval."""
    found = np.rint(np.array(histograms["output_tokens"]["count"])).astype(np.int64)
    return np.asarray(np.maximum(found, 0))


def _means(histograms: Mapping[str, Any], name: str) -> Floats:
    """Return the mean of a latency in each interval, in seconds.

    The mean is interpolated for intervals without a request.
    """
    one = histograms.get(name)
    if one is None:
        return np.full(len(histograms["t_s"]), np.nan)
    count, total = np.array(one["count"]), np.array(one["sum"])
    with np.errstate(invalid="ignore", divide="ignore"):
        means = pd.Series(total / np.where(count > 0, count, np.nan))
    return np.asarray(means.interpolate(limit_direction="both"), np.float64)


def _mean_of(values: Floats, which: Ints, size: int) -> Floats:
    """Return the mean over all values of the same interval, for each value."""
    total, count = np.bincount(which, values, size), np.bincount(which, minlength=size)
    return np.asarray((total / np.maximum(count, 1))[which])


def _per_token(told: Mapping[str, Floats], first: Floats, outputs: Floats, which: Ints) -> Floats:
    """Return the seconds between two tokens of each request, which match its E2E latency.

    The reported inter-token latencies are used only if the E2E latency is unknown.
    """
    size = len(told["e2e"])
    steps = _mean_of(np.maximum(outputs - 1, 0), which, size)
    with np.errstate(invalid="ignore", divide="ignore"):
        found = (told["e2e"][which] - _mean_of(first, which, size)) / steps
    return np.asarray(np.where(np.isfinite(found) & (found > 0), found, told["itl"][which]))


def _lengths(one: Mapping[str, Any], counts: Ints, luck: np.random.Generator) -> Floats:
    """Return sampled numbers of tokens of the requests that ended, interval by interval."""
    edges = [edge for edge in one["le"] if edge is not None]
    below = np.array(one["below"][: len(edges)]) if edges else np.zeros((0, len(counts)))
    lows = np.array([1.0, *[edge + 1 for edge in edges]])
    highs = np.array([*edges, OPEN_BUCKET_FACTOR * max([1.0, *edges])])
    found = []
    for place, count in enumerate(counts.tolist()):
        if not count:
            continue
        inside = np.diff(np.concatenate([[0.0], below[:, place], [count]]))
        buckets = np.repeat(np.arange(len(lows)), np.maximum(np.rint(inside), 0).astype(np.int64))
        buckets = np.resize(buckets if len(buckets) else [len(lows) - 1], count)
        found.append(_in_buckets(lows[buckets], highs[buckets], one["sum"][place], luck))
    return np.concatenate(found) if found else np.zeros(0)


def _in_buckets(low: Floats, high: Floats, total: float, luck: np.random.Generator) -> Floats:
    """Return samples between ``low`` and ``high``, moved toward the sum ``total`` within the
    limits.
    """
    values = low + luck.random(len(low)) * (np.maximum(high, low) - low)
    luck.shuffle(order := np.arange(len(low)))
    values, low, high = values[order], low[order], np.maximum(high, low)[order]
    for _ in range(12):
        lacking = total - values.sum()
        room = high - values if lacking > 0 else values - low
        if room.sum() <= 0 or abs(lacking) < 0.5 * len(low):
            break
        values = values + np.sign(lacking) * room * min(abs(lacking) / room.sum(), 1.0)
    return np.asarray(np.maximum(np.rint(values), 1.0))


def _arrivals(
    grid: Floats, counts: Ints, series: pd.DataFrame, at_once: float, luck: np.random.Generator
) -> Floats:
    """Return sampled arrival times.

    The number of arrivals in an interval is the number of finished requests plus the increase in
    requests in the system.
    """
    summed = series.groupby("t_s")[["running", "waiting"]].sum().sum(axis="columns")
    there = np.rint(np.interp(grid, summed.index, summed.to_numpy(np.float64))).astype(np.int64)
    came = counts + np.diff(there, prepend=there[0])
    carried = 0
    for place in range(len(came)):
        came[place] += carried
        carried = min(int(came[place]), 0)
        came[place] = max(int(came[place]), 0)
    early = int(counts.sum() - came.sum())
    starts = np.concatenate([[grid[0]], grid[:-1]])
    times = [
        start + sample_arrival_shares(n, at_once, luck) * (end - start)
        for start, end, n in zip(starts, grid, came.tolist(), strict=True)
        if n
    ]
    # Requests that are in the system before the first scrape get its time as their arrival.
    whole = [np.full(max(early, 0), grid[0]), *times]
    return np.sort(np.concatenate(whole))


def sample_arrival_shares(count: int, at_once: float, luck: np.random.Generator) -> Floats:
    """Return sampled arrival times as fractions of the time between two scrapes.

    ``at_once`` is the fraction of the requests that arrive at the same time.
    """
    found = luck.random(count)
    return np.asarray(np.where(luck.random(count) < at_once, luck.random(), found), np.float64)


def select_likely_members(figures: pd.DataFrame) -> pd.DataFrame:
    """Return the sampled workloads whose simulations are closest to the observation, closest first.

    ``figures`` has one row per workload. A row contains simulated and observed mean E2E and TTFT
    (s), or the distance to the lines of a log (``apart``).
    """
    if "apart" in figures:
        by_fit = figures.sort_values("apart", kind="stable")
        near = int((by_fit["apart"] <= MAX_DISTANCE_RATIO * by_fit["apart"].iloc[0]).sum())
        return by_fit.head(max(near, len(by_fit) // 3, 2))
    apart = sum(
        np.abs(np.log(figures[name] / figures[f"{name}_observed"])) for name in ("e2e", "ttft")
    )
    order = np.argsort(np.asarray(apart), kind="stable")
    return figures.iloc[order[: max(len(figures) // 2, 2)]]


def interval(values: Sequence[float], observed: float | None = None) -> tuple[float, float]:
    """Return the 90 % interval of a metric over several sampled workloads (Student's t).

    The interval is wider if their mean differs from the observed value.
    """
    mean, spread = float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else 0.0
    off = 0.0 if observed is None or np.isnan(observed) else mean - observed
    half = 1.9 * float(np.hypot(spread, off))
    return mean - half, mean + half
