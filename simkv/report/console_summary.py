"""Default console output of a run: the answer, a table of variants, and further lines.

The answer has at most five lines: result, affected requests, cause, fix, and confidence.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import fsum, inf
from typing import Any

import numpy as np
from rich.console import RenderableType
from rich.text import Text

from simkv.core.figure_registry import (
    METRICS,
    Metric,
    figure,
    format_seconds,
    is_lower_bound,
)
from simkv.core.outcome import count_served
from simkv.metrics.expectation_checks import ExpectationCheck, format_found
from simkv.metrics.fidelity import find_step_errors
from simkv.metrics.run_result import RunResult
from simkv.report import narrative
from simkv.report.adaptive_table import AdaptiveTable, Column
from simkv.report.console_details import settings_lines
from simkv.report.published_figures import PublishedComparison
from simkv.scenario.run_fields import FieldDifference, find_differences
from simkv.sim.run_record import RunRecord

#: Columns after name, ending and finished requests, with their rank; columns with the highest rank
#: are omitted first.
_FIGURES = {
    "ttft_all_ms.median": 2,
    "ttft_all_ms.p99": 3,
    "tpot_ms.mean": 5,
    "output_throughput": 4,
    "ttft_all_ms.mean": 7,
    "e2e_all_ms.mean": 8,
    "makespan_s": 9,
    "preemptions": 10,
    "recomputed_tokens": 11,
    "longest_stall_s": 12,
    "e2e_all_ms.p99": 13,
}
#: Minimum number of requests for a statement about the load.
MIN_LOAD_REQUESTS = 50
#: Minimum queue at the last arrival of an overload, as a fraction of all requests, and the maximum
#: ratio of finished to arrived requests.
MIN_QUEUED_SHARE = 0.05
MAX_ANSWERED_SHARE = 0.9
#: Minimum improvement (``narrative.improvement``) by other hardware that is mentioned.
MIN_HARDWARE_GAIN = 0.2
#: Ratio of makespans below which the explanation of a thrashing variant that finishes sooner is
#: printed.
_SOONER = 0.95


def render_brief(
    results: Mapping[str, RunResult],
    comparisons: Sequence[PublishedComparison],
    checks: Sequence[ExpectationCheck],
) -> Iterator[RenderableType]:
    """Yield the answer, the table of variants, and further lines of the default output."""
    for line in summarize_results(results):
        yield Text(line)
    yield build_variants_table(results)
    if any(is_lower_bound(r.summary, key) for r in results.values() for key in _FIGURES):
        yield Text(narrative.LOWER_BOUND_NOTE)
    for line in (*uncertain(results), *explain_faster_recompute(results)):
        yield Text(line)
    for line in settings_lines(results):
        yield Text(line)
    for line in _besides(results, comparisons, checks):
        yield Text(line)


def summarize_results(results: Mapping[str, RunResult]) -> list[str]:
    """Return the answer: result, affected requests, cause, fix (if useful), and confidence."""
    name = narrative.select_variant(results)
    result = results[name]
    answer = {
        "Result": _describe_result(results, name),
        "Affected": next(iter(narrative.describe_affected(result, most=3)), ""),
        "Cause": narrative.describe_cause(result),
        "Fix": _describe_fix(results, name),
        "Confidence": _describe_confidence(results),
    }
    return [f"{label}: {text}" for label, text in answer.items() if text]


def _describe_result(results: Mapping[str, RunResult], name: str) -> str:
    scenario = results[name].scenario.name
    where = scenario if len(results) == 1 else f"{scenario}, {name}"
    _, _, wrong = narrative.describe_ending(results[name]).partition("served, ")
    wrong = wrong and f", but {wrong}"
    might = narrative.might(results[name])
    return (
        f"{where}: "
        f"{narrative.format_outcome_counts(results[name].record)}{wrong}{might and f'; {might}'}."
    )


def _describe_fix(results: Mapping[str, RunResult], name: str) -> str:
    ours = results[name]
    bad = narrative.describe_ending(ours) not in ("served", "cut off")
    if other := narrative.find_better_variant(results, name):
        theirs = results[other].summary
        how = f"serves {narrative.format_served(theirs)}"
        if count_served(theirs) == count_served(ours.summary):
            how = _describe_largest_gain(ours.summary, theirs)
        if might := narrative.might(results[other]):
            how += f", but {might}"
        differ = find_differences(ours.scenario, results[other].scenario)
        what = str(differ[0]) if len(differ) == 1 else f"{len(differ)} fields differ"
        return f"variant {other} {how} ({what})."
    overload = describe_overload(ours.record)
    if overload:
        setting = narrative.find_limiting_setting(ours)
        larger = f"a larger {setting}, " if setting else ""
        overload += f"; use {larger}more replicas or a lower rate (`simkv plan`)."
    if not bad:
        return overload
    rejected = ours.summary["rejected"]
    if rejected and rejected + count_served(ours.summary) == ours.summary["requests"]:
        return (
            "the engine rejects these requests under any load; send shorter requests, or use a "
            "model and settings with a larger limit."
        )
    comparable = all(
        narrative.has_same_world(ours.scenario, result.scenario) for result in results.values()
    )
    where = "" if comparable else " on the same workload and hardware"
    how = _describe_other_hardware(results, name)
    more = f"{overload[:-1]}; try `simkv whatif`" if overload else "try `simkv whatif`"
    return f"no variant fixes this{where}; {how or more}."


def _describe_other_hardware(results: Mapping[str, RunResult], name: str) -> str:
    """Return a phrase with the best variant that differs in its hardware only, or "".

    Such variants change weight formats or GPUs. They are named but not called a fix, because they
    can change the answers of the model or the cost.
    """
    ours = results[name]
    gains = {
        other: narrative.improvement(ours.summary, theirs.summary)
        for other, theirs in results.items()
        if narrative.describe_ending(theirs) in ("served", "cut off")
        and {change.field.partition(".")[0] for change in _changes(ours, theirs)}
        <= {"hardware", "engine"}
    }
    best = max(gains, key=lambda other: gains[other], default="")
    if not best or gains[best] < MIN_HARDWARE_GAIN:
        return ""
    what = ", ".join(map(str, _changes(ours, results[best], hardware=True)[:3]))
    metric = METRICS["ttft_all_ms.mean"]
    before, after = (
        narrative.format_metric(summary, metric.key, metric.format)
        for summary in (ours.summary, results[best].summary)
    )
    return (
        f"with other hardware settings, variant {best} changes {metric.label} from {before} to "
        f"{after} ({what})"
    )


def _changes(ours: RunResult, theirs: RunResult, hardware: bool = False) -> list[FieldDifference]:
    """Return the differences of two variants, or only those in ``hardware``."""
    found = find_differences(ours.scenario, theirs.scenario)
    return [one for one in found if not hardware or one.field.startswith("hardware")]


def describe_overload(record: RunRecord) -> str:
    """Return a clause if requests arrive faster than the server answers them, or "".

    This is the case if two conditions hold during the last two thirds of the arrivals: the queue
    grows, and fewer requests end than arrive. The queue consists of all requests that have not
    received a token.
    """
    lives = sorted(record.requests.values(), key=lambda life: life.request.arrival)
    arrivals = np.array([life.request.arrival for life in lives])
    if len(lives) < MIN_LOAD_REQUESTS or arrivals[-1] <= arrivals[0]:
        return ""
    begun = np.sort([inf if x.first_token is None else x.first_token for x in lives])
    ended = np.sort([inf if x.ended_at is None else x.ended_at for x in lives])
    first, last = arrivals[0], arrivals[-1]
    third = (last - first) / 3
    times = first + third * np.array([1.0, 2.0, 3.0])
    queued = np.searchsorted(arrivals, times, side="right") - np.searchsorted(begun, times, "right")
    came = np.searchsorted(arrivals, last, "right") - np.searchsorted(arrivals, times[0], "right")
    done = np.searchsorted(ended, last, "right") - np.searchsorted(ended, times[0], "right")
    grows = queued[0] < queued[1] < queued[2] and queued[2] >= MIN_QUEUED_SHARE * len(lives)
    if not grows or done >= MAX_ANSWERED_SHARE * came or done == 0:
        return ""
    # From the first end of a request on, a request begins whenever the server can serve one more.
    later = begun[(begun > ended[0]) & np.isfinite(begun)]
    sustained = done / (2 * third)
    if len(later) > 1 and later[-1] > later[0]:
        sustained = (len(later) - 1) / (later[-1] - later[0])
    return (
        f"the load exceeds what the server sustains: {came / (2 * third):.3g} requests/s arrive, "
        f"{sustained:.3g}/s are served, and {queued[2]:,} are queued at the last arrival"
    )


def _describe_largest_gain(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    """Return a phrase with the metric that improves most, before and after."""

    def gain(metric: Metric) -> float:
        before, after = figure(ours, metric.key), figure(theirs, metric.key)
        if before is None or after is None:
            return 0.0
        return float((before + 1e-3) / (after + 1e-3))

    best = max(narrative.COMPARED_FIGURES, key=gain)
    before, after = (best.format(figure(figures, best.key)) for figures in (ours, theirs))
    return f"reduces {best.label} from {before} to {after}"


def _describe_confidence(results: Mapping[str, RunResult]) -> str:
    """Return a sentence with the basis and the error of the step times of each cost profile."""
    errors: dict[str, str] = {}
    variants: dict[str, list[str]] = {}
    for name, result in results.items():
        found = result.fidelity
        known = "error unknown"
        if ends := find_step_errors(found.errors):
            typical, most = (f"{100 * end:.1f} %" for end in ends)
            known = f"typical error {typical}, 95 % of steps within {most}"
        if calibration := result.scenario.provenance.calibration:
            known = f"calibrated: {calibration}; before calibration, {known}"
        errors[found.profile] = f"{found.basis}, {known}"
        variants.setdefault(errors[found.profile], []).append(name)
    out = max(result.fidelity.outside for result in results.values())
    if len(variants) == 1:
        text = f"step times {next(iter(variants))}"
    elif len(errors) > 2:
        text = "; ".join(f"step times of {', '.join(who)} {how}" for how, who in variants.items())
    else:
        text = "; ".join(f"step times of {name} {how}" for name, how in errors.items())
    outside = (
        f"; up to {100 * out:.0f} % of the time is outside the measured range of the profile"
        if out >= 0.005
        else ""
    )
    return f"{text}{outside}."


def build_variants_table(results: Mapping[str, RunResult]) -> AdaptiveTable:
    """Build a table with one row per variant.

    For requests without an answer, latencies are their waiting times.
    """
    found = list(results.values())
    finished = [f"{r.summary['finished']:,} of {r.summary['requests']:,}" for r in found]
    columns = [
        Column("variant", list(results), right=False),
        Column("ending", list(map(narrative.describe_ending, found)), 1, right=False),
        Column("finished", finished, 6),
    ]
    for key, rank in _FIGURES.items():
        if any(METRICS[key].unit or result.summary[key] for result in found):
            metric = METRICS[key]
            columns.append(
                Column(
                    metric.label,
                    [narrative.format_metric(r.summary, key, metric.format) for r in found],
                    rank,
                )
            )
    return AdaptiveTable(columns)


def uncertain(results: Mapping[str, RunResult]) -> Iterator[str]:
    """Yield sentences about requests that might fail in variants that the answer does not
    mention.
    """
    lead = narrative.select_variant(results)
    mentioned = {lead, narrative.find_better_variant(results, lead)}
    for name, result in results.items():
        if name not in mentioned and (might := narrative.might(result)):
            yield f"{name}: {might}."


def explain_faster_recompute(results: Mapping[str, RunResult]) -> Iterator[str]:
    """Yield an explanation if a variant with thrashing finishes sooner than one without
    thrashing.
    """
    for name, result in results.items():
        if result.summary["verdict"] != "served" or "thrash" not in narrative.describe_ending(
            result
        ):
            continue
        slower = [
            (other, theirs)
            for other, theirs in results.items()
            if narrative.has_same_world(result.scenario, theirs.scenario)
            and narrative.describe_ending(theirs) == "served"
            and result.summary["makespan_s"] < _SOONER * theirs.summary["makespan_s"]
        ]
        for other, theirs in slower[:1]:
            yield (
                f"{name} finishes earlier ({format_seconds(result.summary['makespan_s'])}) than "
                f"{other} ({format_seconds(theirs.summary['makespan_s'])}) because of its step "
                "times, not because of its scheduling: its steps contain "
                f"{_step(result.record)}, steps of {other} contain {_step(theirs.record)} (step "
                f"times {result.fidelity.basis})."
            )


def _step(record: RunRecord) -> str:
    """Return the mean number of requests in a step and the mean duration of a step, as a phrase.

    The phrase has the form ``3.6 requests and take 0.10 s``.
    """
    log = record.steps
    held = sum(log.prefill_seqs) + sum(log.decode_seqs)
    lasted = fsum(end - start for start, end in zip(log.start, log.end, strict=True))
    return f"{held / len(log):.1f} requests and take {format_seconds(lasted / len(log))}"


def _besides(
    results: Mapping[str, RunResult],
    comparisons: Sequence[PublishedComparison],
    checks: Sequence[ExpectationCheck],
) -> Iterator[str]:
    if checks:
        missed = [check for check in checks if not check.ok]
        yield f"Expectations: {len(checks) - len(missed)} of {len(checks)} hold" + (
            "." if not missed else "; failed:"
        )
        for check in missed:
            yield f"  {check.variant}: {check}"
    if comparisons:
        errors = [abs(row.error) for row in comparisons if row.error is not None]
        largest = f", largest error {100 * max(errors):.2f} %" if errors else ""
        text = f"Published: {len(comparisons)} figures compared{largest}"
        off = [row for row in comparisons if row.verdict in ("does not hold", "differs")]
        said = ", ".join(
            f"{r.variant} {r.figure} {r.told}: {format_found(r.simulated)}" for r in off[:3]
        )
        yield f"{text}{f'; not reproduced: {said}' if off else ''}."
    sources = next(iter(results.values())).scenario.provenance
    kinds = {"given": sources.given, "fitted": sources.fitted, "assumed": sources.assumed}
    if any(kinds.values()):
        parts = [f"{len(lines)} {kind}" for kind, lines in kinds.items() if lines]
        yield f"Sources: {', '.join(parts)} (--full)."
    notes = list(dict.fromkeys(note for result in results.values() for note in result.notes))
    if notes:
        more = f" (and {len(notes) - 1} more, --full)" if len(notes) > 1 else ""
        yield f"Note: {notes[0]}{more}"
