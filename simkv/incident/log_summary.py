"""Summarize the measured metrics of a server's log, and name the problems that they show.

A summary needs no reconstruction. It is the whole answer if the log does not determine the
workload, for example if the log is an excerpt of ten lines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pandas as pd

from simkv.core.figure_registry import format_seconds
from simkv.incident.evidence import Evidence, sum_over_ranks

#: KV cache usage that counts as full, and below which it is certainly not (shares).
FULL_CACHE, FREE_CACHE = 0.95, 0.8
#: Share of lines with a queue from which requests are said to queue.
QUEUE_SHARE = 0.5
#: Output tokens per second and running request below which decoding is slow.
SLOW_DECODE_RATE = 2.0
#: Fall of the prefix hit rate that is reported as a problem.
HIT_RATE_FALL = 0.15
#: Growth of running requests that suggests eviction as the reason.
LOAD_GROWTH = 1.2
#: Time before the engine core above which the front end limits TTFT: in s, and as a share of TTFT.
FRONT_END_S, FRONT_END_SHARE = 0.05, 0.5
#: Number of successive lines without any token that count as a hang.
HANG_LINES = 2


@dataclass(frozen=True)
class Finding:
    """A pattern in the measured metrics: its name, a sentence, and whether it is a problem."""

    name: str
    text: str
    problem: bool = True


@dataclass(frozen=True)
class LogSummary:
    """Measured metrics of a log as text, and the findings, the most important first."""

    figures: str
    findings: tuple[Finding, ...]
    affected: str

    @property
    def problems(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.problem)


def summarize_log(evidence: Evidence) -> LogSummary | None:
    """Return the summary of a log.

    Return None if the inputs have neither statistics nor access lines nor the end of the engine
    process.
    """
    lines = None
    if evidence.series is not None and len(evidence.series):
        lines = _summed(evidence.series)
    elif evidence.steps is not None and len(evidence.steps):
        lines = _summed(_series_of(evidence.steps))
    if lines is None and evidence.access is None and evidence.died is None:
        return None
    counted = _Requests(evidence.access)
    findings = [*_death(evidence), *counted.findings(), *_front_end(evidence)]
    figures, affected = counted.text, "unknown"
    if lines is not None:
        limit = evidence.settings.get("max_num_seqs") or evidence.settings.get(
            "max_running_requests"
        )
        slots = limit.value if limit is not None and isinstance(limit.value, int) else None
        findings += [found for rule in _RULES for found in rule(lines, slots)]
        figures = _figures(lines) + (f"; {counted.text}" if counted.text else "")
        most = float(lines["waiting"].max())
        affected = f"up to {most:.0f} requests waited at the same time" if most else "none waited"
    if evidence.arrivals is not None and not figures:
        figures = f"{len(evidence.arrivals)} requests arrived"
    return LogSummary(figures or "no statistics lines", _without_doubles(findings), affected)


def _without_doubles(findings: list[Finding]) -> tuple[Finding, ...]:
    """Remove the general finding of a queue if a more specific finding explains it."""
    specific = {"KV cache full", "admission limit", "blocked queue", "hang", "prefill bound"}
    explained = any(finding.name in specific for finding in findings)
    return tuple(one for one in findings if not (explained and one.name == "queue"))


def _summed(series: pd.DataFrame) -> pd.DataFrame:
    """Return the statistics by time, summed over the data-parallel ranks."""
    found = sum_over_ranks(series)
    each = series.drop_duplicates(["t_s", "engine"], keep="last")
    for name in ("prompt_rate", "output_rate"):
        table = each.pivot(index="t_s", columns="engine", values=name)
        found[name] = table.sum(axis="columns", min_count=1)
    found["hit_rate"] = each.groupby("t_s")["hit_rate"].mean()
    found["preemptions"] = each.groupby("t_s")["preemptions"].sum()
    return found.reset_index()


def _series_of(steps: pd.DataFrame) -> pd.DataFrame:
    """Return logged iterations in the columns of statistics lines, as far as iterations have
    them.
    """
    seconds = steps["seconds"].where(steps["seconds"] > 0)
    return steps[["t_s", "engine", "usage"]].assign(
        running=steps["prefill_seqs"] + steps["decode_seqs"],
        waiting=0,
        prompt_rate=steps["prefill_tokens"] / seconds,
        output_rate=steps["decode_tokens"] / seconds,
        hit_rate=float("nan"),
        preemptions=0,
    )


class _Requests:
    """Numbers of requests in the access lines."""

    def __init__(self, access: pd.DataFrame | None) -> None:
        names = ("accepted", "rejected", "failed")
        self.accepted, self.rejected, self.failed = (
            0 if access is None else int(access[name].sum()) for name in names
        )

    @property
    def text(self) -> str:
        total = self.accepted + self.rejected + self.failed
        if not total:
            return ""
        return f"{total:,} requests ({self.rejected} with status 4xx, {self.failed} with 5xx)"

    def findings(self) -> Iterator[Finding]:
        if self.failed:
            total = self.accepted + self.rejected + self.failed
            yield Finding("errors", f"{self.failed} of {total} requests failed with status 5xx")


def _front_end(evidence: Evidence) -> Iterator[Finding]:
    """Yield a finding if the TTFT is far above queue time plus prefill time.

    The reason is then tokenization, routing or the API server.
    """
    requests = evidence.requests
    if requests is None or "prefill_ms" not in requests:
        return
    known = requests[["ttft_ms", "queue_ms", "prefill_ms"]].dropna() / 1e3
    if not len(known):
        return
    ttft, queue, prefill = (float(known[name].median()) for name in known)
    front = ttft - queue - prefill
    if front > FRONT_END_S and front > FRONT_END_SHARE * ttft:
        yield Finding(
            "front-end bound",
            f"of a median TTFT of {1e3 * ttft:.0f} ms, {1e3 * front:.0f} ms passed before the "
            f"engine (queue {1e3 * queue:.0f} ms, prefill {1e3 * prefill:.0f} ms)",
        )


def _death(evidence: Evidence) -> Iterator[Finding]:
    if evidence.died:
        yield Finding("engine died", f"the engine died ({evidence.died})")


def _figures(lines: pd.DataFrame) -> str:
    """Return the measured metrics in the statistics lines as one sentence."""
    span = format_seconds(float(lines["t_s"].iloc[-1] - lines["t_s"].iloc[0]))
    parts = [f"{len(lines):,} lines over {span}"]
    for name in ("running", "waiting"):
        low, high = lines[name].min(), lines[name].max()
        ends = f"{low:.0f}" if low == high else f"{low:.0f} to {high:.0f}"
        parts.append(f"{name} {ends} (mean {lines[name].mean():.1f})")
    for name, label in (("usage", "KV cache"), ("hit_rate", "prefix hit rate")):
        known = lines[name].dropna()
        if len(known):
            first, last = 100 * known.iloc[0], 100 * known.iloc[-1]
            most = f", at most {100 * known.max():.0f} %" if name == "usage" else ""
            parts.append(f"{label} {first:.0f} to {last:.0f} %{most}")
    rates = []
    for name, label in (("prompt_rate", "prompt"), ("output_rate", "output")):
        if lines[name].notna().any():
            rates.append(f"{lines[name].mean():,.1f} {label}")
    if rates:
        parts.append(f"{' and '.join(rates)} tokens/s")
    if lines["preemptions"].sum():
        parts.append(f"{lines['preemptions'].sum():.0f} preemptions")
    return ", ".join(parts)


def _hang(lines: pd.DataFrame, _slots: int | None) -> Iterator[Finding]:
    """Yield a finding on successive lines in which no token was computed while requests ran."""
    rates = lines[["prompt_rate", "output_rate"]]
    idle = (rates.fillna(0.0) == 0).all(axis="columns") & rates.notna().any(axis="columns")
    there = lines["running"] + lines["waiting"] > 0
    silent = (idle & there).to_numpy()
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
        )


def _blocked(lines: pd.DataFrame, slots: int | None) -> Iterator[Finding]:
    """Yield a finding on a queue that does not get shorter although the cache has free blocks."""
    queued = lines[lines["waiting"] > 0]
    if len(queued) < HANG_LINES or (queued["usage"] >= FULL_CACHE).any():
        return
    if slots is not None and queued["running"].max() >= slots:
        return
    stuck = queued["prompt_rate"].notna().any() and not queued["prompt_rate"].fillna(0.0).any()
    few = bool((queued["running"] <= queued["waiting"]).all())
    moved = queued["waiting"].diff().min() < 0 or queued["running"].nunique() > 1
    if stuck and few and not moved:
        usage = f", KV cache {100 * queued['usage'].max():.0f} %" if queued["usage"].any() else ""
        yield Finding(
            "blocked queue",
            f"{queued['waiting'].iloc[-1]:.0f} requests wait and none is admitted while "
            f"{queued['running'].iloc[-1]:.0f} run{usage}: the first in the queue does not fit, or "
            "the scheduler does not consider it",
        )


def _cache_full(lines: pd.DataFrame, _slots: int | None) -> Iterator[Finding]:
    full = lines["usage"] >= FULL_CACHE
    if (full & (lines["waiting"] > 0)).any():
        share = 100 * full.mean()
        yield Finding(
            "KV cache full",
            f"requests wait for KV blocks: the cache was at least {100 * FULL_CACHE:.0f} % full in "
            f"{share:.0f} % of the lines",
        )
    if lines["preemptions"].sum():
        yield Finding("preemptions", f"{lines['preemptions'].sum():.0f} preemptions")
    if full.any() and not (full & (lines["waiting"] > 0)).any():
        yield Finding(
            "KV cache nearly full",
            f"the cache was up to {100 * lines['usage'].max():.0f} % full, but no request waited",
            False,
        )


def _admission(lines: pd.DataFrame, slots: int | None) -> Iterator[Finding]:
    queued = lines[lines["waiting"] > 0]
    free = queued["usage"].notna().any() and queued["usage"].max() < FREE_CACHE
    if not (len(queued) >= QUEUE_SHARE * len(lines) and len(queued) and free):
        return
    usage = f"the KV cache was at most {100 * queued['usage'].max():.0f} % full"
    most = float(queued["running"].max())
    at_limit = float((queued["running"] >= most - 0.02 * most).mean())
    if slots is not None and most >= slots:
        yield Finding("admission limit", f"all {slots} slots were busy while {usage}")
    elif most > 2 and at_limit >= 0.8 and len(queued) >= HANG_LINES:
        yield Finding(
            "admission limit",
            f"never more than {most:.0f} requests ran while {usage}: probably the limit of "
            "concurrent requests (max_num_seqs, max_running_requests)",
        )
    elif queued["prompt_rate"].fillna(0.0).mean() > 5 * queued["output_rate"].fillna(0.0).mean():
        yield Finding(
            "prefill bound",
            f"requests wait for prefill at {queued['prompt_rate'].mean():,.0f} prompt tokens/s "
            f"while {usage}",
        )


def _queue(lines: pd.DataFrame, _slots: int | None) -> Iterator[Finding]:
    share = float((lines["waiting"] > 0).mean())
    if share >= QUEUE_SHARE:
        yield Finding(
            "queue",
            f"requests waited in {100 * share:.0f} % of the lines, {lines['waiting'].mean():.1f} "
            "on average",
        )


def _slow_decode(lines: pd.DataFrame, _slots: int | None) -> Iterator[Finding]:
    alone = lines[(lines["running"] > 0) & (lines["prompt_rate"].fillna(0.0) == 0)]
    alone = alone[alone["output_rate"] > 0]
    if len(alone) < HANG_LINES:
        return
    each = float((alone["output_rate"] / alone["running"]).median())
    if each < SLOW_DECODE_RATE:
        yield Finding("slow decoding", f"each running request got only {each:.2g} tokens/s")


def _hit_rate(lines: pd.DataFrame, _slots: int | None) -> Iterator[Finding]:
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


def _client_bound(lines: pd.DataFrame, slots: int | None) -> Iterator[Finding]:
    if lines["waiting"].max() == 0 and (slots is None or lines["running"].max() < slots):
        yield Finding("client bound", "no request waited: the clients limit the load", False)


_RULES: tuple[Callable[[pd.DataFrame, int | None], Iterator[Finding]], ...] = (
    _hang,
    _cache_full,
    _blocked,
    _admission,
    _queue,
    _slow_decode,
    _hit_rate,
    _client_bound,
)
