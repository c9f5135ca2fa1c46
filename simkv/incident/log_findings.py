"""Findings: patterns in a server's statistics lines that show what limits the server.

Each rule takes the lines, summed over data-parallel ranks, and the limit on running requests, and
yields findings. Findings about a cause, such as a full cache, come before findings about its
effects, such as a growing queue. No rule needs a reconstructed workload or a simulation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pandas as pd

from simkv.core.figure_registry import format_seconds

#: Minimum KV cache usage (a fraction) of a full cache, and maximum usage of a cache that is
#: certainly not full.
FULL_CACHE, FREE_CACHE = 0.95, 0.8
#: Fraction of the lines that must report a queue for the finding that requests queue.
QUEUE_SHARE = 0.5
#: Number of output tokens per second and running request below which decoding counts as slow.
SLOW_DECODE_RATE = 2.0
#: Decrease of the prefix hit rate that is reported as a problem.
HIT_RATE_FALL = 0.15
#: Increase of running requests that suggests that eviction lowered the hit rate.
LOAD_GROWTH = 1.2
#: Number of successive lines without any computed token that count as a hang.
HANG_LINES = 2
#: Limits for "Running is constant": the maximum distance from the highest value of Running (a
#: fraction, at least one request), and the fraction of the lines with a queue that must be within
#: this distance.
PINNED_DISTANCE, PINNED_SHARE = 0.03, 0.7
#: Minimum growth of a queue in requests, the number of lines over which it must grow, and the
#: maximum number of parts of this time that are compared.
QUEUE_GROWTH, GROWTH_LINES, GROWTH_PARTS = 5, 3, 20
#: Suggested changes if the KV cache is the limit.
MORE_CACHE = (
    "more KV blocks (more GPU memory or a smaller KV dtype), more replicas, or fewer tokens per "
    "request"
)

#: Suggested actions after a hang.
HANG_ADVICE = "record the stacks of the engine's processes (py-spy dump), then restart the server"


@dataclass(frozen=True)
class Finding:
    """A pattern in the measured metrics: its name, a sentence, and whether it is a problem.

    ``advice`` is the suggested change, or "". ``inferred`` is the name and value of a setting that
    follows from the log.
    """

    name: str
    text: str
    problem: bool = True
    advice: str = ""
    inferred: tuple[str, int] | None = None


@dataclass(frozen=True)
class SlotLimit:
    """Limit on running requests: the setting's name, and its value (None if not logged).

    ``single`` is true if the log describes one engine, and false for several data-parallel ranks.
    """

    name: str
    slots: int | None
    single: bool = True


def _hang(lines: pd.DataFrame, _limit: SlotLimit) -> Iterator[Finding]:
    """Yield a finding if no token was computed in several successive lines although requests
    ran.
    """
    silent = _silent(lines).to_numpy()
    longest, current, last = 0, 0, 0
    for row, one in enumerate(silent.tolist()):
        current = current + 1 if one else 0
        if current > longest:
            longest, last = current, row
    if longest >= HANG_LINES:
        times = lines["t_s"].to_numpy(np.float64)
        spent = format_seconds(float(times[last] - times[last - longest + 1]))
        yield Finding(
            "hang",
            f"no token was computed for {spent} while {lines['running'].iloc[last]:.0f} requests "
            f"ran and {lines['waiting'].iloc[last]:.0f} waited",
            advice=HANG_ADVICE,
        )


def _silent(lines: pd.DataFrame) -> pd.Series[bool]:
    """Return, for each line, whether no token was computed although there were requests."""
    rates = lines[["prompt_rate", "output_rate"]]
    idle = (rates.fillna(0.0) == 0).all(axis="columns") & rates.notna().any(axis="columns")
    return idle & (lines["running"] + lines["waiting"] > 0)


def _blocked(lines: pd.DataFrame, limit: SlotLimit) -> Iterator[Finding]:
    """Yield a finding if the queue does not become shorter although the cache has free blocks.

    Lines of a hang, in which the engine computes nothing, are left out.
    """
    queued = lines[(lines["waiting"] > 0) & ~_silent(lines)]
    if len(queued) < HANG_LINES or (queued["usage"] >= FULL_CACHE).any():
        return
    if limit.slots is not None and queued["running"].max() >= limit.slots:
        return
    stuck = queued["prompt_rate"].notna().any() and not queued["prompt_rate"].fillna(0.0).any()
    few = bool((queued["running"] <= queued["waiting"]).all())
    moved = queued["waiting"].diff().min() < 0 or queued["running"].nunique() > 1
    if stuck and few and not moved:
        usage = f", KV cache {100 * queued['usage'].max():.0f} %" if queued["usage"].any() else ""
        yield Finding(
            "blocked queue",
            f"{queued['waiting'].iloc[-1]:.0f} requests wait and none is admitted, although "
            f"only {queued['running'].iloc[-1]:.0f} run{usage}: the first request in the queue "
            "does not fit, or the scheduler skips it",
        )


def _cache_full(lines: pd.DataFrame, _limit: SlotLimit) -> Iterator[Finding]:
    """Yield findings on a full KV cache and on preemptions."""
    full = lines["usage"] >= FULL_CACHE
    highest = 100 * lines["usage"].max()
    if (full & (lines["waiting"] > 0)).any():
        yield Finding(
            "KV cache full",
            f"requests wait for KV blocks: the cache was up to {highest:.0f} % full, and at least "
            f"{100 * FULL_CACHE:.0f} % in {100 * full.mean():.0f} % of the lines",
            advice=MORE_CACHE,
        )
    if lines["preemptions"].sum():
        minutes = float(lines["t_s"].iloc[-1] - lines["t_s"].iloc[0]) / 60
        each = f" ({lines['preemptions'].sum() / minutes:.3g} per minute)" if minutes else ""
        yield Finding(
            "preemptions", f"{lines['preemptions'].sum():.0f} preemptions{each}", advice=MORE_CACHE
        )
    if full.any() and not (full & (lines["waiting"] > 0)).any():
        yield Finding(
            "KV cache nearly full",
            f"the cache was up to {highest:.0f} % full, but no request waited",
            False,
        )


def _admission(lines: pd.DataFrame, limit: SlotLimit) -> Iterator[Finding]:
    """Yield a finding if requests wait for slots or for prefill while the cache has free blocks.

    An unknown limit is inferred if the number of running requests stays constant while requests
    wait.
    """
    busy = lines[(lines["running"] + lines["waiting"] > 0) & ~_silent(lines)]
    queued = busy[busy["waiting"] > 0]
    if not (len(queued) and len(queued) >= QUEUE_SHARE * len(busy)):
        return
    if not (queued["usage"].notna().any() and queued["usage"].max() < FULL_CACHE):
        return
    usage = f"the KV cache was at most {100 * queued['usage'].max():.0f} % full"
    most = float(queued["running"].max())
    near = queued["running"] >= most - max(PINNED_DISTANCE * most, 1.0)
    pinned = (
        f"the number of running requests stayed at {most:.0f} in {100 * near.mean():.0f} % of "
        "the lines with a "
    )
    pinned += f"queue while {usage}"
    slots, advice = limit.slots, f"raise {limit.name}"
    if slots is not None and most >= slots:
        text = f"{pinned}: all {slots} slots were busy ({limit.name}={slots})"
        yield Finding("admission limit", text, advice=advice)
    elif lines["preemptions"].sum():
        return  # these requests wait for KV blocks instead of slots
    elif slots is None and most > 2 and near.mean() >= PINNED_SHARE and len(queued) >= HANG_LINES:
        text = f"{pinned}: probably all slots were busy ({limit.name}={most:.0f}, inferred)"
        found = (limit.name, int(most)) if limit.single else None
        yield Finding("admission limit", text, advice=advice, inferred=found)
    elif (
        queued["usage"].max() < FREE_CACHE
        and queued["prompt_rate"].fillna(0.0).mean() > 5 * queued["output_rate"].fillna(0.0).mean()
    ):
        yield Finding(
            "prefill bound",
            f"requests wait for prefill at {queued['prompt_rate'].mean():,.0f} prompt tokens/s "
            f"while {usage}",
        )


def _growth(lines: pd.DataFrame, _limit: SlotLimit) -> Iterator[Finding]:
    """Yield a finding if the queue grows over several lines."""
    lines = lines[~_silent(lines)]
    if not len(lines):
        return
    waiting = lines["waiting"].to_numpy(np.float64)
    peak = int(waiting.argmax())
    low = np.flatnonzero(waiting[: peak + 1] <= 0.1 * waiting[peak])
    start = int(low[-1]) if len(low) else 0
    grown = waiting[peak] - waiting[start]
    if peak - start < GROWTH_LINES or grown < max(QUEUE_GROWTH, 0.5 * waiting[peak]):
        return
    minutes = float(lines["t_s"].iloc[peak] - lines["t_s"].iloc[start]) / 60
    # Lines of SGLang are so close that the queue often stays the same between two of them.
    rows = np.unique(np.linspace(start, peak, min(peak - start, GROWTH_PARTS) + 1).astype(int))
    if (np.diff(waiting[rows]) > 0).mean() < PINNED_SHARE or minutes <= 0:
        return
    yield Finding(
        "queue grows",
        f"the queue grew from {waiting[start]:.0f} to {waiting[peak]:.0f} requests within "
        f"{format_seconds(60 * minutes)}: {grown / minutes:.3g} requests per minute arrived beyond "
        "the throughput",
        advice="more replicas or less load",
    )


def _queue(lines: pd.DataFrame, _limit: SlotLimit) -> Iterator[Finding]:
    share = float((lines["waiting"] > 0).mean())
    if share >= QUEUE_SHARE:
        yield Finding(
            "queue",
            f"requests waited in {100 * share:.0f} % of the lines, {lines['waiting'].mean():.1f} "
            "on average",
        )


def _slow_decode(lines: pd.DataFrame, _limit: SlotLimit) -> Iterator[Finding]:
    alone = lines[(lines["running"] > 0) & (lines["prompt_rate"].fillna(0.0) == 0)]
    alone = alone[alone["output_rate"] > 0]
    if len(alone) < HANG_LINES:
        return
    each = float((alone["output_rate"] / alone["running"]).median())
    if each < SLOW_DECODE_RATE:
        yield Finding("slow decoding", f"each running request received only {each:.2g} tokens/s")


def _hit_rate(lines: pd.DataFrame, _limit: SlotLimit) -> Iterator[Finding]:
    known = lines["hit_rate"].dropna().to_numpy(np.float64)
    if len(known) < HANG_LINES:
        return
    fall = float(known.max() - known[-1])
    if fall >= HIT_RATE_FALL:
        third = max(len(lines) // 3, 1)
        before, after = (float(part["running"].mean()) for part in (lines[:third], lines[-third:]))
        why = ""
        if after > LOAD_GROWTH * before:
            why = (
                f" while running requests rose from {before:.0f} to {after:.0f}: cached turns are "
                "probably evicted before they are reused"
            )
        yield Finding(
            "hit rate falls",
            f"the prefix hit rate fell from {100 * known.max():.0f} to {100 * known[-1]:.0f} %"
            f"{why}",
        )


def _client_bound(lines: pd.DataFrame, limit: SlotLimit) -> Iterator[Finding]:
    if lines["waiting"].max() == 0 and (
        limit.slots is None or lines["running"].max() < limit.slots
    ):
        yield Finding("client bound", "no request waited: the clients limit the load", False)


RULES: tuple[Callable[[pd.DataFrame, SlotLimit], Iterator[Finding]], ...] = (
    _hang,
    _cache_full,
    _blocked,
    _admission,
    _growth,
    _queue,
    _slow_decode,
    _hit_rate,
    _client_bound,
)
