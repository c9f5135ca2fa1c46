"""Summarize the measured metrics of a server's log, and name the problems that they show.

A summary needs no reconstruction of the workload. It is the whole answer if the log does not
determine the workload, for example in an excerpt of ten lines.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pandas as pd

from simkv.core.figure_registry import format_seconds
from simkv.incident.evidence import INFERRED, Evidence, sum_over_ranks
from simkv.incident.log_findings import QUEUE_GROWTH, QUEUE_SHARE, RULES, Finding, SlotLimit
from simkv.incident.source_reader import log_reader

#: Time before the engine core above which the front end counts as a limit of TTFT: in s, and as a
#: fraction of TTFT.
FRONT_END_S, FRONT_END_SHARE = 0.05, 0.5
#: Suggested change after a CUDA out-of-memory error.
OUT_OF_MEMORY_ADVICE = (
    "less GPU memory for the KV cache (lower gpu_memory_utilization), or fewer tokens per step "
    "(lower max_num_batched_tokens)"
)
#: Minimum share of requests with status 4xx that is reported.
MIN_REJECTED_SHARE = 0.05
#: Minimum length of a short queue in lines.
SHORT_QUEUE_LINES = 3
#: Maximum number of running requests of a rank with room, relative to the busy rank.
UNBALANCED_SHARE = 0.5
#: Name of the setting that limits running requests, in engines without a log reader.
SLOT_SETTING = "max_num_seqs"


@dataclass(frozen=True)
class LogSummary:
    """Metrics that were measured in a log, and the problems found in the log.

    ``figures`` has the metrics as text. ``findings`` has the problems; the most important problem
    comes first.
    """

    figures: str
    findings: tuple[Finding, ...]
    affected: str

    @property
    def problems(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.problem)


def summarize_log(evidence: Evidence) -> LogSummary | None:
    """Return the summary of a log, or None if the inputs contain no metrics."""
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
        limit = _slot_limit(evidence)
        findings += _unbalanced_ranks(evidence.series)
        findings += [found for rule in RULES for found in rule(lines, limit)]
        if not any(finding.problem for finding in findings):
            findings = [*_short_queue(lines, limit), *findings]
        figures = _figures(lines) + (f"; {counted.text}" if counted.text else "")
        most = float(lines["waiting"].max())
        affected = f"up to {most:.0f} requests waited at the same time" if most else "none waited"
    if evidence.arrivals is not None and not figures:
        figures = f"{len(evidence.arrivals)} requests arrived"
    return LogSummary(figures or "no statistics lines", _without_doubles(findings), affected)


def _short_queue(lines: pd.DataFrame, limit: SlotLimit) -> Iterator[Finding]:
    """Yield the findings of the longest queue in a log without a problem as a whole.

    The rules then see only the lines of this queue.
    """
    queued = lines["waiting"] > 0
    number = (queued != queued.shift()).cumsum()[queued]
    if number.empty:
        return
    longest = lines.loc[number.index[number == number.mode().iloc[0]]]
    if len(longest) < SHORT_QUEUE_LINES or longest["waiting"].max() < QUEUE_GROWTH:
        return
    begin, end = float(longest["t_s"].iloc[0]), float(longest["t_s"].iloc[-1])
    when = (
        f"for {format_seconds(end - begin)}, {format_seconds(begin - float(lines['t_s'].iloc[0]))} "
        "after the first line"
    )
    for rule in RULES:
        for found in rule(longest.reset_index(drop=True), limit):
            if found.problem:
                yield replace(found, text=f"{when}: {found.text}")


def _unbalanced_ranks(series: pd.DataFrame | None) -> Iterator[Finding]:
    """Yield a finding if requests wait for one data-parallel rank while another one has room."""
    if series is None or series["engine"].nunique() < 2 or series["engine"].min() < 0:
        return
    each = series.drop_duplicates(["t_s", "engine"], keep="last")
    waiting, running = (
        each.pivot(index="t_s", columns="engine", values=name).ffill().fillna(0.0)
        for name in ("waiting", "running")
    )
    long = waiting.max(axis="columns") >= QUEUE_GROWTH
    waiting, running = waiting[long], running[long]
    if waiting.empty:
        return
    busy, free = waiting.mean().idxmax(), waiting.mean().idxmin()
    uneven = (waiting[free] == 0) & (running[free] <= UNBALANCED_SHARE * running[busy])
    if uneven.mean() < QUEUE_SHARE:
        return
    yield Finding(
        "unbalanced ranks",
        f"rank {busy} had {running[busy].mean():.0f} running and up to {waiting[busy].max():.0f} "
        f"waiting requests while rank {free} had only {running[free].mean():.0f} running and none "
        "waiting",
        advice="a router that sends requests to the rank with the fewest requests",
    )


def _slot_limit(evidence: Evidence) -> SlotLimit:
    """Return the limit on running requests of all ranks together."""
    reader = log_reader(evidence.engine)
    name = reader.SLOT_SETTING if reader else SLOT_SETTING
    ranks, stated = 1, evidence.settings.get(name)
    if evidence.series is not None and len(evidence.series):
        engines = evidence.series["engine"]
        # a negative number means a line that covers several engines
        ranks = max(int(engines.nunique()), -int(engines.min()))
    inferred = stated is not None and stated.where == INFERRED
    if stated is None or inferred or not isinstance(stated.value, int):
        return SlotLimit(name, None, ranks == 1)
    return SlotLimit(name, ranks * stated.value, ranks == 1)


def _without_doubles(findings: list[Finding]) -> tuple[Finding, ...]:
    """Remove the general finding about a queue if another finding explains the queue.

    Also remove the finding that clients limit the load if the server hangs or rejects requests.
    """
    specific = {"KV cache full", "admission limit", "blocked queue", "hang", "prefill bound"}
    specific.add("queue grows")
    names = {finding.name for finding in findings}
    removed = {"queue"} if names & specific else set()
    removed |= {"client bound"} if names & {"hang", "rejected requests"} else set()
    # The load suffices for the ranks together.
    removed |= {"queue grows", "queue"} if "unbalanced ranks" in names else set()
    return tuple(one for one in findings if one.name not in removed)


def _summed(series: pd.DataFrame) -> pd.DataFrame:
    """Return the statistics at each time, summed over the data-parallel ranks."""
    found = sum_over_ranks(series)
    each = series.drop_duplicates(["t_s", "engine"], keep="last")
    for name in ("prompt_rate", "output_rate"):
        table = each.pivot(index="t_s", columns="engine", values=name)
        found[name] = table.sum(axis="columns", min_count=1)
    found["hit_rate"] = each.groupby("t_s")["hit_rate"].mean()
    found["preemptions"] = each.groupby("t_s")["preemptions"].sum()
    return found.reset_index()


def _series_of(steps: pd.DataFrame) -> pd.DataFrame:
    """Return logged iterations with the columns of statistics lines, as far as possible."""
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
        total = self.accepted + self.rejected + self.failed
        if self.rejected >= MIN_REJECTED_SHARE * total > 0:
            yield Finding(
                "rejected requests",
                f"{self.rejected} of {total} requests were rejected with status 4xx",
                advice="if the status is 429, more replicas or a lower rate",
            )
        if self.failed:
            yield Finding("errors", f"{self.failed} of {total} requests failed with status 5xx")


def _front_end(evidence: Evidence) -> Iterator[Finding]:
    """Yield a finding if the TTFT is far above queue time plus prefill time.

    The rest of the TTFT is spent in tokenization, routing or the API server.
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
        advice = OUT_OF_MEMORY_ADVICE if "out of memory" in evidence.died.lower() else ""
        yield Finding("engine died", f"the engine died ({evidence.died})", advice=advice)


def _figures(lines: pd.DataFrame) -> str:
    """Return the measured metrics in the statistics lines as one sentence."""
    span = format_seconds(float(lines["t_s"].iloc[-1] - lines["t_s"].iloc[0]))
    parts = [f"{len(lines):,} lines over {span}"]
    for name in ("running", "waiting"):
        low, high = lines[name].min(), lines[name].max()
        ends = f"{low:.0f}" if low == high else f"{low:.0f} to {high:.0f}"
        parts.append(f"{name} {ends} (mean {lines[name].mean():.1f})")
    for name, label in (("usage", "KV cache"), ("hit_rate", "prefix hit rate")):
        known = 100 * lines[name].dropna()
        if len(known):
            least, most = f"{known.min():.0f}", f"{known.max():.0f}"
            ends = least if least == most else f"{least} to {most}"
            parts.append(f"{label} {ends} % (mean {known.mean():.0f} %)")
    rates = []
    for name, label in (("prompt_rate", "prompt"), ("output_rate", "output")):
        if lines[name].notna().any():
            rates.append(f"{lines[name].mean():,.1f} {label}")
    if rates:
        parts.append(f"{' and '.join(rates)} tokens/s")
    if lines["preemptions"].sum():
        parts.append(f"{lines['preemptions'].sum():.0f} preemptions")
    return ", ".join(parts)
