"""Text and tables of a page, as its template uses them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from simkv.core.figure_registry import (
    METRICS,
    format_number,
    is_lower_bound,
)
from simkv.explain.ledger_kinds import KIND_LABELS, LedgerKind
from simkv.explain.wait_ledger import total_by_kind
from simkv.metrics.expectation_checks import check_expectations, format_found
from simkv.metrics.run_result import RunResult
from simkv.report import narrative
from simkv.report.page_data import error_row
from simkv.report.published_figures import PublishedComparison, compare_published
from simkv.scenario.scenario_writer import to_yaml
from simkv.sim.run_record import RunRecord

#: Columns of the table of variants; times are in seconds.
COLUMNS = (
    "finished",
    "makespan_s",
    "ttft_all_ms.mean",
    "ttft_all_ms.p99",
    "e2e_all_ms.mean",
    "e2e_all_ms.p99",
    "longest_stall_s",
    "output_throughput",
    "preemptions",
    "recomputed_tokens",
)
CAPTIONS = {
    "lanes": "One lane per request, in order of arrival. Hover over a lane to see what the request "
    "waited for; drag a box to zoom in; use the arrow keys to step through requests. Arrows are "
    "preemptions: they point from the request that gained blocks to the request that lost its KV.",
    "sessions": "Turns of the slowest sessions, with the tool calls and think times before them. "
    "Turns that run at the same time, such as those of sub-agents, are in separate rows.",
    "moment": "The step, queues and KV blocks at a time. Click in the figure above, or use the "
    "arrow keys here to go to the previous or next step (Shift: ten steps, Page keys: a hundred). "
    "The address of the page opens the same moment again. Cells of the block map are grouped by "
    "request because simkv does not store the positions of blocks; gray cells are cached or "
    "shared.",
    "blocks": "KV blocks by request: the largest holders, and all others. The dashed line is the "
    "size of the cache.",
    "queues": "Running requests, waiting requests and the load of steps. Lines show the mean per "
    "time bin; bands show the minimum and the maximum.",
    "ledger": "Mean time of a request from arrival to end, by activity or cause of waiting.",
    "requests": "Time of each request by activity or cause of waiting, in order of arrival.",
    "blockers": "Requests that held blocks or slots for which other requests waited, with the "
    "waiting time attributed to each. The chart includes the waiting time of "
    "finished requests. “Cause” above includes only unserved requests, if there are any.",
    "latency": "Share of all requests that received the first token, or the complete answer, "
    "within a given time. If a curve ends below 100 %, the remaining requests were "
    "not served.",
    "published": "Error bars show the rms error of the cost profile over the measurements "
    "to which it was fitted.",
}


def build_page_text(results: Mapping[str, RunResult], pair: Sequence[str]) -> dict[str, Any]:
    """Return the values of the variables of the page template."""
    lead = pair[0]
    result = results[lead]
    other = narrative.find_better_variant(results, lead)
    about = [_about(part) for part in _by_scenario(results)]
    comparisons = compare_published(dict(results))
    return {
        "title": narrative.title(results),
        "scenarios": about,
        "lead": {
            "name": lead,
            "other": other,
            **badge(result),
            "affected": list_affected(result),
            "cause": _causes(result),
            "fix": narrative.describe_fix(results, lead, other),
            "verdicts": result.diagnosis.verdicts,
        },
        "has_requests": any(found.record.requests for found in results.values()),
        "has_sessions": any(found.run.clients.after for found in results.values()),
        "columns": [METRICS[key].heading_in_seconds for key in COLUMNS],
        "variants": [
            {
                "name": name,
                **badge(found),
                "cells": [_cell(found, key) for key in COLUMNS],
                "verdicts": found.diagnosis.verdicts,
                "waste": _waste(found),
                "notes": found.notes,
            }
            for name, found in results.items()
        ],
        "accuracy": _accuracy(results),
        "ledger": _ledger_table(results),
        "published": [_published_row(row, results) for row in comparisons],
        "drawn_published": any(row.error is not None for row in comparisons),
        "published_notes": [
            f"{name}: {published.note}"
            for name, found in results.items()
            if (published := found.scenario.published.get(name)) and published.note
        ],
        "checks": [
            (
                f"{c.variant}: {c.figure}",
                c.expected,
                format_found(c.found),
                "ok" if c.ok else "missed",
            )
            for c in check_expectations(results)
        ],
        "profiles": _profiles(results),
    }


def _by_scenario(results: Mapping[str, RunResult]) -> list[dict[str, RunResult]]:
    """Group results by scenario."""
    parts: dict[str, dict[str, RunResult]] = {}
    for name, result in results.items():
        parts.setdefault(result.scenario.name, {})[name] = result
    return list(parts.values())


def _about(results: dict[str, RunResult]) -> dict[str, Any]:
    scenario = next(iter(results.values())).scenario
    return {
        "name": scenario.name,
        "summary": scenario.summary,
        "report": scenario.report,
        **scenario.provenance.model_dump(),
        "yaml": to_yaml({name: result.scenario for name, result in results.items()}),
    }


def list_affected(result: RunResult) -> list[str]:
    """Return sentences about the outcomes, the affected requests, and the requests that might
    fail.
    """
    counts = f"{narrative.format_outcome_counts(result.record)}."
    said = [counts, *narrative.describe_affected(result), narrative.might(result)]
    return [f"{line[0].upper()}{line[1:].removesuffix('.')}." for line in said if line]


def _causes(result: RunResult) -> list[str]:
    """Return the sentences about the cause, as on the console, and about blockers."""
    cause = narrative.describe_cause(result)
    blockers = narrative.describe_blockers(result.record, result.diagnosis)
    return [f"{cause[0].upper()}{cause[1:]}", *(line for line in blockers if line not in cause)]


def badge(result: RunResult) -> dict[str, str]:
    """Return the verdict as a word, with a sign and a color class."""
    said = narrative.describe_ending(result)
    served = result.summary["verdict"] == "served"
    tone = "good" if said == "served" else "warn" if served else "bad"
    return {"verdict": said, "sign": {"good": "✓", "warn": "!", "bad": "✗"}[tone], "tone": tone}


def _cell(result: RunResult, key: str) -> str:
    if key == "finished":
        return f"{result.summary[key]:,} of {result.summary['requests']:,}"
    return narrative.format_metric(
        result.summary, key, lambda value: format_number(METRICS[key].to_seconds(value))
    )


def _waste(result: RunResult) -> list[str]:
    found = result.diagnosis
    said = (narrative.describe_waste(found), narrative.describe_overtakes(found))
    return [sentence for sentence in said if sentence]


def _accuracy(results: Mapping[str, RunResult]) -> str:
    """Return sentences about the accuracy of step times, one per cost profile."""
    said = []
    if any(is_lower_bound(result.summary, key) for result in results.values() for key in COLUMNS):
        said.append(narrative.LOWER_BOUND_NOTE)
    for profile in {r.profile.name: r.profile for r in results.values()}.values():
        known = [
            f"error of {kind} steps {100 * error.median:.1f} % (median) and "
            f"{100 * error.p95:.1f} % (P95) over {error.points:,} held-out steps"
            for kind, error in profile.fit.held_out.items()
        ]
        if not known and profile.fit.rms_s is None:
            known = ["error unknown"]
        what = "; ".join([_step_times(profile), *known])
        said.append(f"Step times by cost profile {profile.name}: {what}.")
    return " ".join(said)


def _step_times(profile: Any) -> str:
    return narrative.describe_step_times(profile.basis, profile.fit.points, profile.fit.rms_s)


def _ledger_table(results: Mapping[str, RunResult]) -> dict[str, Any]:
    sums = {
        name: total_by_kind(i for lane in result.diagnosis.ledger.values() for i in lane)
        for name, result in results.items()
    }
    kinds = [kind for kind in LedgerKind if any(part.get(kind) for part in sums.values())]
    return {
        "head": ["variant", *(KIND_LABELS[kind] for kind in kinds)],
        "rows": [
            [
                name,
                *(
                    format_number(part.get(kind, 0.0) / max(len(results[name].record.requests), 1))
                    for kind in kinds
                ),
            ]
            for name, part in sums.items()
        ],
    }


def _published_row(row: PublishedComparison, results: Mapping[str, RunResult]) -> tuple[str, ...]:
    drawn = error_row(row, results)
    return (
        f"{row.variant}: {row.figure}",
        row.told,
        "none" if row.simulated is None else f"{row.simulated:.6g}",
        row.verdict,
        f"± {drawn['bar']:.2f} %" if drawn and drawn["bar"] is not None else "",
    )


def _profiles(results: Mapping[str, RunResult]) -> list[dict[str, Any]]:
    """Return the sources of each cost profile, its measured range, and the range of the run."""
    found = []
    for profile in {r.profile.name: r.profile for r in results.values()}.values():
        records = [r.record for r in results.values() if r.profile.name == profile.name]
        rows = []
        for feature, (low, high) in profile.range.items():
            seen = _seen(records, feature)
            here = [format_number(value) for value in seen] if seen else ["", ""]
            rows.append((feature, format_number(low), format_number(high), *here))
        found.append(
            {
                "name": profile.name,
                "text": f"{profile.engine}, {profile.model} on {profile.gpu}: "
                f"{_step_times(profile)}.",
                "note": profile.fit.note,
                "source": profile.source,
                "range": rows,
            }
        )
    return found


def _seen(records: Sequence[RunRecord], feature: str) -> tuple[int, int] | None:
    """Return the minimum and maximum of a feature over the steps with a nonzero value."""
    values: set[int] = set()
    for record in records:
        log = record.steps
        if feature in ("prefill_seqs", "prefill_tokens", "decode_seqs"):
            values.update(getattr(log, feature))
        elif feature == "tokens":
            values.update(a + b for a, b in zip(log.prefill_tokens, log.decode_seqs, strict=True))
    values.discard(0)
    return (min(values), max(values)) if values else None


def captions(results: Mapping[str, RunResult], page: Mapping[str, Any]) -> dict[str, str]:
    """Return the captions of the plots by name."""
    said = dict(CAPTIONS)
    left_out = [
        f"{name}: {len(variant['lanes']['of']):,} of {len(result.record.requests):,} shown"
        for (name, result), variant in zip(results.items(), page["variants"], strict=True)
        if len(variant["lanes"]["of"]) < len(result.record.requests)
    ]
    if left_out:
        said["lanes"] += f" {'; '.join(left_out)}, including every kind of outcome."
    if any(result.diagnosis.preemptions for result in results.values()):
        said["lanes"] += " Zoom in if there are too many preemptions to show arrows."
    return said
