"""Data of the plots of a page: names, colors and columns of all variants."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from simkv.core.figure_registry import METRICS
from simkv.core.outcome import SERVED, Outcome
from simkv.explain.blame import PREEMPTION_LABELS
from simkv.explain.ledger_kinds import COMPUTE_KINDS, KIND_LABELS, LedgerKind
from simkv.explain.wait_ledger import total_by_kind
from simkv.metrics.run_metrics import e2e, ttft
from simkv.metrics.run_result import RunResult
from simkv.report import chart_data, narrative
from simkv.report.lanes_plot import BARS
from simkv.report.plot_style import FAILURE_MARKS, find_end_time
from simkv.report.published_figures import PublishedComparison, compare_published
from simkv.report.session_lanes import build_session_rows
from simkv.schedulers.engine_registry import find_engine_spec

SYMBOLS = {
    "X": "x",
    "s": "square",
    "P": "cross",
    "D": "diamond",
    ">": "triangle-right",
    "v": "triangle-down",
    "|": "line-ns-open",
}


def build_page_data(results: Mapping[str, RunResult], pair: Sequence[str]) -> dict[str, Any]:
    """Return the data for the page's scripts."""
    records = {name: result.record for name, result in results.items()}
    end = find_end_time(records.values()) or 1.0
    ticks = chart_data.TickScale(end)
    edges = chart_data.time_bins(end)
    shows = [chart_data.find_lane_stretches(r.record, r.diagnosis.ledger) for r in results.values()]
    room = chart_data.split_fairly(
        [sum(map(len, lanes.values())) for lanes in shows], chart_data.MAX_STRETCHES
    )
    latencies = [
        life.ended_at - life.request.arrival
        for r in records.values()
        for life in r.requests.values()
        if life.ended_at is not None
    ]
    return {
        "name": next(iter(results.values())).scenario.name,
        "title": narrative.title(results),
        "tick": ticks.seconds,
        "end": end,
        "slowest": max([*latencies, 1e-9]),
        "edges": [round(edge, 9) for edge in edges.tolist()],
        "pair": [list(results).index(name) for name in pair],
        "kinds": [
            {"key": code, "served": code in COMPUTE_KINDS, "life": code in list(LedgerKind)}
            for code in chart_data.CODES
        ],
        "words": {kind: label for kind, (label, _) in BARS.items()}
        | {kind.value: words for kind, words in KIND_LABELS.items()}
        | {"tools": "tool calls", "think": "think time"},
        "causes": PREEMPTION_LABELS,
        "outcomes": [_outcome(outcome) for outcome in Outcome],
        "vain": [outcome.wasted_wait_label for outcome in Outcome],
        "published": [
            row
            for comparison in compare_published(dict(results))
            if (row := error_row(comparison, results))
        ],
        "variants": [
            _variant(name, result, ticks, edges)
            | {
                "lanes": (shown := chart_data.lane_columns(result.record, lanes, ticks, most)),
                "sessions": build_session_rows(result, ticks),
                "steps": chart_data.step_columns(result.record, ticks),
                "holdings": chart_data.holding_columns(
                    result.record,
                    shown["of"],
                    find_engine_spec(result.scenario.engine).block_size(result.scenario.engine),
                    ticks,
                ),
                "arrows": chart_data.preemption_arrows(
                    result.record, result.diagnosis, ticks, most // 10
                ),
            }
            for (name, result), lanes, most in zip(results.items(), shows, room, strict=True)
        ],
    }


def _variant(
    name: str, result: RunResult, ticks: chart_data.TickScale, edges: chart_data.Floats
) -> dict[str, Any]:
    record, found, engine = result.record, result.diagnosis, result.scenario.engine
    lives = list(record.requests.values())
    stop = record.engine_halt
    sums = total_by_kind(interval for lane in found.ledger.values() for interval in lane)
    return {
        "name": name,
        "served": narrative.format_outcome_counts(record),
        "until": find_end_time([record]) or 1.0,
        "standstill": None if stop is None else {"kind": stop.kind, "since": stop.since},
        "requests": chart_data.request_columns(record, ticks),
        "owners": chart_data.block_owners(
            record, find_engine_spec(engine).block_size(engine), edges
        ),
        "courses": chart_data.step_log_columns(record, edges),
        "curves": {
            "ttft": chart_data.cumulative_curve(map(ttft, lives), len(lives)),
            "e2e": chart_data.cumulative_curve(map(e2e, lives), len(lives)),
        },
        "totals": [chart_data.shorten_number(sums.get(kind, 0.0), 9) for kind in LedgerKind]
        + [0, 0],
        "blockers": [
            [b.id, chart_data.shorten_number(b.seconds), chart_data.shorten_number(b.block_seconds)]
            for b in found.blockers[:50]
        ],
        "blocked": chart_data.blocker_texts(record, found),
    }


def _outcome(outcome: Outcome) -> dict[str, str | bool]:
    """Return the label and marker of an outcome, and whether the request counts as served."""
    mark = FAILURE_MARKS.get(outcome)
    in_vain = {Outcome.STARVED: "red", Outcome.TIMED_OUT: "brown"}.get(outcome, "purple")
    return {
        "key": outcome.value,
        "served": outcome in SERVED,
        "word": outcome.word,
        "label": outcome.label,
        "symbol": SYMBOLS[mark.marker] if mark else "circle",
        "colour": in_vain if mark else "blue",
    }


def error_row(row: PublishedComparison, results: Mapping[str, RunResult]) -> dict[str, Any] | None:
    """Return a published metric with the error of the simulated value in percent, or None."""
    if row.error is None:
        return None
    rms = results[row.variant].profile.fit.rms_s
    bar = None
    if rms is not None and row.published and (scale := _per_second(row.figure)):
        bar = 100.0 * rms * scale / abs(row.published)
    return {
        "variant": row.variant,
        "figure": row.figure,
        "published": row.published,
        "simulated": row.simulated,
        "error": 100.0 * row.error,
        "bar": bar,
    }


def _per_second(name: str) -> float | None:
    """Return the factor from seconds to the unit of a metric, or None if the metric is not a
    time.
    """
    if metric := METRICS.get(name):
        return metric.per_second
    return 1.0 if name.endswith("_s") else None  # a metric of a single request
