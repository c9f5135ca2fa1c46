"""Build the answer of a diagnosis: five summary lines, then the evidence as Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pandas as pd

from simkv.core.figure_registry import format_seconds
from simkv.explain.ledger_kinds import KIND_LABELS
from simkv.explain.verdicts.unserved_requests import Starvation
from simkv.explain.verdicts.verdict import Verdict
from simkv.incident.diagnosis_document import (
    describe_remedy,
    remedy_lines,
    render_diagnosis,
    request_label,
    request_labels,
    summary_lines,
    timeline_lines,
    verdict_lines,
    victim_lines,
)
from simkv.incident.evidence import INFERRED, Evidence
from simkv.incident.log_summary import LogSummary, summarize_log
from simkv.incident.measured_answer import IncidentAnswer
from simkv.incident.observed_comparison import ObservedComparison
from simkv.incident.remedies import (
    Remedy,
    RemedySearch,
    has_same_effect,
    is_minor,
    mean_gain,
)
from simkv.incident.server_setup import ServerSetup
from simkv.incident.wait_summary import (
    MAX_WAIT_SHARE,
    WaitSummary,
    find_victims,
    is_healthy,
    server_verdicts,
    summarize_waits,
)
from simkv.incident.workload_ensemble import interval
from simkv.incident.workload_rebuild import is_counted, is_sampled
from simkv.metrics.run_metrics import compute_slowdown
from simkv.metrics.run_result import RunResult
from simkv.report.narrative import describe_cause

#: Maximum difference between reconstructions, relative to their mean, for a result that counts as
#: identified.
IDENTIFIABLE_SPREAD = 0.5
#: Relative error of an estimated number of requests. In 72 reconstructions of 24 simulated logs
#: with constant, uniform and lognormal lengths, 90 % of the errors were smaller.
COUNT_ERROR = 0.15
#: Settings of the queue order, with the requests that each policy prefers.
POLICY_FIELDS = ("schedule_policy", "policy")
QUEUE_ORDERS = {
    "lpm": "longer cached prefixes",
    "dfs-weight": "more shared prefixes",
    "hrrn": "higher response ratios",
    "shortest-prefill-first": "shorter prefills",
    "lof": "longer outputs",
    "priority": "higher priority",
}
#: Suggested action if the simulation does not reproduce an incident.
MORE_SETTINGS = "Specify missing settings with --set engine.NAME=VALUE and diagnose again"
#: Maximum number of settings that the ``Cause:`` line names.
MAX_SETTINGS = 3


def refuse_explanation(
    likeness: ObservedComparison,
    setup: ServerSetup,
    evidence: Evidence,
    notes: Sequence[str],
    beside: pd.DataFrame,
) -> IncidentAnswer:
    """Return the answer for a simulation that does not reproduce the observation.

    The answer is the most important finding in the log lines, if there is one. It also lists the
    missing information. ``beside`` is the table of observed and simulated values over time.
    """
    missed = "; ".join(
        f"{line.name}: {line.simulated:.4g} simulated, {line.observed:.4g} {line.kind}"
        for line in likeness.missed[:3]
    )
    asks = [*setup.assumed, *evidence.lacks] or ["the server may use something not modelled"]
    more = f" (and {len(asks) - 1} more in diagnosis.md)" if len(asks) > 1 else ""
    summary = summarize_log(evidence)
    problem = summary.problems[0] if summary and summary.problems else None
    differs = f"The simulation differs: {missed}. A possible reason: {asks[0]}{more}."
    if summary and problem:
        unnamed = "" if evidence.requests is not None else "; the inputs do not identify requests"
        fix = problem.advice or f"unknown. {MORE_SETTINGS}"
        five = (
            "Result: the simulation does not reproduce "
            f"{evidence.source}; the answer follows from the log lines alone.",
            f"Affected: {summary.affected}{unnamed}.",
            f"Cause: {problem.name}: {problem.text}.",
            f"Fix: {fix}.",
            f"Confidence: the cause is measured, but not simulated. {differs}",
        )
    else:
        five = (
            f"Result: no explanation; the simulation does not reproduce {evidence.source}.",
            "Affected: unknown.",
            f"Cause: unknown. {differs}",
            f"Fix: unknown. {MORE_SETTINGS}.",
            "Confidence: none. observed.png and compared.csv compare the values.",
        )
    rest = [*summary_lines(summary), *timeline_lines(beside)]
    text = render_diagnosis(five, likeness, setup, evidence, notes, rest)
    cause = problem.name if problem else "not reproduced"
    return IncidentAnswer(five, text, False, False, cause, None)


def explain_incident(
    result: RunResult,
    observed: pd.DataFrame,
    likeness: ObservedComparison,
    mending: RemedySearch | None,
    setup: ServerSetup,
    evidence: Evidence,
    notes: Sequence[str],
    beside: pd.DataFrame,
    ensemble: pd.DataFrame | None = None,
) -> IncidentAnswer:
    """Return the answer for a reproduced incident: affected requests, cause and fix.

    ``ensemble`` contains the metrics of all likely workloads if the requests were sampled.
    ``mending`` is the result of the search for better flags, or None.
    """
    waits, found = summarize_waits(result), server_verdicts(result)
    healthy = is_healthy(result)
    slow = waits.share < MAX_WAIT_SHARE and not found
    cause = "nothing" if healthy else "slow in company" if slow else _cause(found, waits)
    remedy = mending.remedies[0] if mending and mending.remedies and not healthy else None
    summary = summarize_log(evidence)
    five = (
        _describe_result(observed, setup, waits, healthy),
        _describe_affected(observed, waits, healthy, is_sampled(evidence)),
        _describe_cause(result, found, waits, healthy, slow)
        + (
            ""
            if healthy
            else _describe_order(result, found) + describe_settings(mending, setup.sources)
        )
        + ("" if healthy else describe_inferred(setup))
        + _describe_measured(summary),
        describe_search(mending, healthy, is_sampled(evidence))
        + ("" if healthy else describe_unknown_prefixes(setup, observed)),
        _describe_confidence(likeness, setup, ensemble, is_counted(evidence)),
    )
    rest = [
        *summary_lines(summary),
        *(() if is_sampled(evidence) else victim_lines(observed, result, waits)),
        *verdict_lines(found, result),
        *(remedy_lines(mending) if mending and not healthy else ()),
        *timeline_lines(beside),
    ]
    text = render_diagnosis(five, likeness, setup, evidence, notes, rest)
    return IncidentAnswer(five, text, healthy, True, cause, remedy)


def _describe_measured(summary: LogSummary | None) -> str:
    """Return a text about the measured findings that confirm the cause, or ""."""
    named = ("hit rate falls", "front-end bound", "preemptions")
    found = [one.text for one in summary.findings if one.name in named] if summary else []
    return f" Measured: {'; '.join(found)}." if found else ""


def _cause(found: Sequence[Verdict], waits: WaitSummary) -> str:
    if found:
        return found[0].name
    return KIND_LABELS[max(waits.kinds, key=lambda kind: waits.kinds[kind])]


def _describe_result(
    observed: pd.DataFrame, setup: ServerSetup, waits: WaitSummary, healthy: bool
) -> str:
    engine = f"{setup.engine['name']} {setup.engine['variant']}"
    count, failed = len(observed), int((observed["output_tokens"] == 0).sum())
    if "warm_up" in observed:
        observed = observed[observed["warm_up"].isna()]
        count = len(observed)
    spent = format_seconds(float(observed["t_s"].max() - observed["t_s"].min()))
    which = f"{count} requests within {spent} on {engine}"
    without = f", {failed} without an answer" if failed else ""
    if healthy:
        return f"Result: healthy; no request waited long ({which}{without})."
    return f"Result: requests waited {100 * waits.share:.0f} % of their time ({which}{without})."


def _describe_affected(
    observed: pd.DataFrame, waits: WaitSummary, healthy: bool, sampled: bool
) -> str:
    failed = observed.index[observed["output_tokens"] == 0].tolist()
    if failed:
        return f"Affected: {request_labels(observed, failed)} got no answer."
    if healthy or not waits.victims:
        slowest = int(observed["e2e_ms"].to_numpy(np.float64).argmax())
        took = format_seconds(observed["e2e_ms"].max() / 1e3)
        which = "a sampled request" if sampled else request_label(observed, slowest)
        return f"Affected: none. Slowest: {which} ({took})."
    worst = find_victims(observed, waits.victims)
    if sampled:
        least = format_seconds(float(observed["queue_ms"].loc[worst].min()) / 1e3)
        return (
            "Affected: unknown, because the inputs do not identify requests. One in ten "
            f"sampled requests queued for {least} or more."
        )
    queued = float(observed["queue_ms"].loc[worst[0]]) / 1e3
    if queued > 0:
        whole = format_seconds(float(observed["e2e_ms"].loc[worst[0]]) / 1e3)
        longest = f"the first queued for {format_seconds(queued)} of its {whole}"
        return f"Affected: {request_labels(observed, worst)}; {longest}."
    return f"Affected: {request_labels(observed, worst)}."


def _describe_cause(
    result: RunResult, found: Sequence[Verdict], waits: WaitSummary, healthy: bool, slow: bool
) -> str:
    if healthy:
        return (
            f"Cause: none. Waiting was {100 * waits.share:.1f} % of all time, "
            f"{100 * waits.worst:.0f} % for the slowest tenth of the requests."
        )
    if slow:
        return (
            "Cause: requests do not wait, but their prefill and decode take "
            f"{compute_slowdown(result.record):.1f} times as long as in isolation."
        )
    return f"Cause: {describe_cause(result, found)}"


def _describe_order(result: RunResult, found: Sequence[Verdict]) -> str:
    """Return a sentence about the order of the queue if requests overtook earlier ones."""
    first = getattr(found[0], "found", found[0]) if found else None
    if not isinstance(first, Starvation) or first.overtaken is None:
        return ""
    engine = result.scenario.engine
    names = [name for name in POLICY_FIELDS if getattr(engine, name, None) in QUEUE_ORDERS]
    return "".join(
        f" The queue order {name}={getattr(engine, name)} admits requests with "
        f"{QUEUE_ORDERS[getattr(engine, name)]} before it."
        for name in names
    )


def describe_settings(search: RemedySearch | None, sources: Mapping[str, str]) -> str:
    """Return a sentence about the settings whose default is better; empty if there are none.

    ``sources`` contains the source of each setting. Settings with the default value of the server's
    GPU are left out.
    """
    remedies = search.remedies if search else ()
    changes = [
        next((one for one in remedies if has_same_effect(one, remedy)), remedy).effect.change
        for remedy in remedies
        if remedy.to_default and remedy.means == "flag" and _holds(remedy)
        if not sources.get(remedy.effect.change.field, "").startswith("default of")
    ]
    named = [f"{one.field}={one.before} (better: {one.after})" for one in changes[:MAX_SETTINGS]]
    return (
        f" Settings with a value that is too low or too high: {', '.join(named)}." if named else ""
    )


def describe_inferred(setup: ServerSetup) -> str:
    """Return a sentence about the settings that no input states, or ""."""
    names = [name for name, where in setup.sources.items() if where == INFERRED]
    named = ", ".join(f"{name}={setup.engine[name]}" for name in names)
    return (
        f" Inferred from the log lines, because the log does not state them: {named}."
        if named
        else ""
    )


def describe_search(search: RemedySearch | None, healthy: bool, sampled: bool = False) -> str:
    """Return the ``Fix:`` line with the best changes of the search.

    ``sampled`` is true if several workloads were sampled. The line then names only changes that
    help in at least 90 % of the workloads.
    """
    if healthy:
        return "Fix: none needed."
    if search is None:
        return "Fix: not searched (--no-try-flags)."
    tried = f"{search.tried} changes tried" + (
        f", {search.cut_off} of them stopped early" if search.cut_off else ""
    )
    if not search.remedies:
        return f"Fix: none found; {tried}."
    notes = []
    if sampled:
        count = _reconstructions(search)
        search = replace(search, remedies=tuple(one for one in search.remedies if _holds(one)))
        if not search.remedies:
            return f"Fix: none holds in at least 90 % of the {count} reconstructions; {tried}."
        gain = search.remedies[0].gain
        assert gain is not None
        notes.append(f"It holds in {gain.holds} of {gain.worlds + 1} reconstructions.")
    flags = search.of("flag")
    others = [*search.of("version"), *search.of("memory")]
    best = search.remedies[0]
    minor = bool(flags) and is_minor(flags[0], mean_gain(best, search.base), search.base)
    if not best.sure:
        shown, text = [best], f"uncertain; {describe_remedy(best)} may help"
    elif flags and flags[0].sure and best.means != "version" and not minor:
        shown, text = flags[:1], describe_remedy(flags[0])
    elif flags and flags[0].sure:
        shown = [best, flags[0]]
        text = f"{describe_remedy(best)}; best flag: {describe_remedy(flags[0])}"
    else:
        shown = [best, *(one for one in others if one is not best)][:2]
        text = f"no flag; {' or '.join(describe_remedy(one) for one in shown)}"
    compared = (one.gain.compared for one in shown if one.gain)
    notes += [sentence for sentence in dict.fromkeys(compared) if sentence]
    return " ".join((f"Fix: {text}; {tried}.", *notes))


def describe_unknown_prefixes(setup: ServerSetup, observed: pd.DataFrame) -> str:
    """Return a note if the effect of prefix caching is unknown, or ""."""
    engine = setup.engine
    off = engine.get("enable_prefix_caching") is False or engine.get("disable_radix_cache")
    if not off or "session" in observed or "cached_tokens" in observed:
        return ""
    return (
        " Prefix caching is off. Its effect is unknown, because the inputs do not show which "
        "prompts share a prefix."
    )


def _holds(remedy: Remedy) -> bool:
    return remedy.gain is not None and remedy.sure


def _reconstructions(search: RemedySearch) -> int:
    """Return the number of reconstructed workloads on which the effects were measured."""
    return 1 + max((one.gain.worlds for one in search.remedies if one.gain), default=0)


def _describe_confidence(
    likeness: ObservedComparison,
    setup: ServerSetup,
    ensemble: pd.DataFrame | None,
    counted: bool,
) -> str:
    """Return the ``Confidence:`` line, with the source of each number."""
    parts = []
    for start, label, unit in (("E2E mean", "mean E2E", " s"), ("mean running", "running", "")):
        line = next((one for one in likeness.lines if one.name.startswith(start)), None)
        if line is not None and np.isfinite(line.observed):
            parts.append(
                f"{label} {line.simulated:.4g}{unit} simulated, {line.observed:.4g}{unit} "
                f"{line.kind} ({line.difference})"
            )
    if not parts:
        parts = ["the simulation matches the inputs"]
    if ensemble is not None:
        parts.append(describe_ensemble(ensemble, counted))
    if setup.assumed:
        count = len(setup.assumed)
        parts.append(f"{count} setting{'s' * (count > 1)} assumed")
    return f"Confidence: {'; '.join(parts)}."


def describe_ensemble(ensemble: pd.DataFrame, counted: bool = True) -> str:
    """Return a sentence about the mean E2E latency over the sampled workloads.

    The range is a 90 % interval. ``counted`` is false if the number of requests is estimated; by
    Little's law, the latency then has the same relative error.
    """
    values = ensemble["e2e"].tolist()
    observed = ensemble.get("e2e_observed", ensemble["e2e"]).mean()
    low, high = interval(values, float(observed))
    mean, half = (low + high) / 2, (high - low) / 2
    if not counted:
        half = float(np.hypot(half, COUNT_ERROR * mean))
    known = 2 * half <= IDENTIFIABLE_SPREAD * mean
    estimated = (
        "" if counted else f"; the number of requests is estimated (±{100 * COUNT_ERROR:.0f} %)"
    )
    return (
        f"the workload is {'identifiable' if known else 'not identifiable'}: mean E2E is "
        f"{max(mean - half, 0.0):.4g} to {mean + half:.4g} s (90 % interval over {len(ensemble)} "
        f"reconstructions){estimated}"
    )
