"""Workloads that agree with sums and histograms, where no source tells single requests.

Between two scrapes as many requests came as ended, and as many more as are in the system now than
were before. Sums do not tell when in that time: of some members they came at any moment with equal
chance (a Poisson process, given how many came), of others a share of them at one moment, for a
burst queues and a stream does not; what they queued tells which members are likely. Their lengths
are drawn from the buckets in which they were counted, evenly within each, and moved within their
buckets until they have the sum that was seen. Who ended then came as long before as it took; in
that order they are given the arrivals.
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
#: Members that are drawn, of which the likelier half is kept; in turn so large a share of the
#: requests between two scrapes comes at one moment.
MEMBERS, BURST_SHARES = 12, (0.0, 0.3, 0.6, 1.0)
#: Members drawn from lines whose runs are so much farther from these than the nearest are kept.
MAX_DISTANCE_RATIO = 1.5
#: Of an open last bucket: it ends at so many times where it begins.
OPEN_BUCKET_FACTOR = 2.0
NEEDED = ("prompt_tokens", "output_tokens")


def can_sample(histograms: Mapping[str, Any]) -> bool:
    """Whether there is enough to draw requests from."""
    return all(name in histograms for name in NEEDED)


def sample_workload(histograms: Mapping[str, Any], series: pd.DataFrame, seed: int) -> pd.DataFrame:
    """A member of the ensemble: requests as ``read_measured`` has them, with what requests that
    ended in the same time took on the mean. Raises InputError if nothing ended."""
    luck = np.random.default_rng(seed)
    grid = np.array(histograms["t_s"])
    counts = _counts(histograms)
    if counts.sum() == 0:
        raise InputError("no request ended between the first scrape and the last")
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
    """Requests that ended until each time."""
    found = np.rint(np.array(histograms["output_tokens"]["count"])).astype(np.int64)
    return np.asarray(np.maximum(found, 0))


def _means(histograms: Mapping[str, Any], name: str) -> Floats:
    """Mean seconds by time; where nothing was counted those of the nearest time."""
    one = histograms.get(name)
    if one is None:
        return np.full(len(histograms["t_s"]), np.nan)
    count, total = np.array(one["count"]), np.array(one["sum"])
    with np.errstate(invalid="ignore", divide="ignore"):
        means = pd.Series(total / np.where(count > 0, count, np.nan))
    return np.asarray(means.interpolate(limit_direction="both"), np.float64)


def _mean_of(values: Floats, which: Ints, size: int) -> Floats:
    """For each value the mean of those of the same time."""
    total, count = np.bincount(which, values, size), np.bincount(which, minlength=size)
    return np.asarray((total / np.maximum(count, 1))[which])


def _per_token(told: Mapping[str, Floats], first: Floats, outputs: Floats, which: Ints) -> Floats:
    """Seconds between two tokens of each request that ended: as many as make up its E2E.

    The gaps that were counted in the same time are no measure of it where it is known: they are of
    those who go on, too, and not of what came before.
    """
    size = len(told["e2e"])
    steps = _mean_of(np.maximum(outputs - 1, 0), which, size)
    with np.errstate(invalid="ignore", divide="ignore"):
        found = (told["e2e"][which] - _mean_of(first, which, size)) / steps
    return np.asarray(np.where(np.isfinite(found) & (found > 0), found, told["itl"][which]))


def _lengths(one: Mapping[str, Any], counts: Ints, luck: np.random.Generator) -> Floats:
    """Tokens of the requests that ended, time by time."""
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
    """Numbers between limits that have a sum, as far as the limits allow."""
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
    """When requests came: as many as ended, and as many more as are there than were before."""
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
    # Those that were there before the first scrape came with it.
    whole = [np.full(max(early, 0), grid[0]), *times]
    return np.sort(np.concatenate(whole))


def sample_arrival_shares(count: int, at_once: float, luck: np.random.Generator) -> Floats:
    """When requests come, as a share of the time between two scrapes."""
    found = luck.random(count)
    return np.asarray(np.where(luck.random(count) < at_once, luck.random(), found), np.float64)


def select_likely_members(figures: pd.DataFrame) -> pd.DataFrame:
    """The members whose simulations come near to what was observed, the nearest first.

    ``figures`` has a row per member with E2E and TTFT means, simulated and observed (s), or how far
    ``apart`` its run is from the lines of a log.
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
    """Where a figure lies with nine chances in ten: by how the likely members differ (Student's t),
    and by how far their mean is from what the sums themselves say, where they do."""
    mean, spread = float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else 0.0
    off = 0.0 if observed is None or np.isnan(observed) else mean - observed
    half = 1.9 * float(np.hypot(spread, off))
    return mean - half, mean + half
