"""Build the answer of a diagnosis: five summary lines, then the evidence as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from simkv.core.figure_registry import format_seconds
from simkv.explain.verdicts.verdict import Verdict
from simkv.explain.wait_ledger import KIND_LABELS
from simkv.incident.diagnosis_document import (
    describe_remedy,
    remedy_lines,
    render_diagnosis,
    request_label,
    request_labels,
    timeline_lines,
    verdict_lines,
    victim_lines,
)
from simkv.incident.evidence import Evidence
from simkv.incident.observed_comparison import ObservedComparison
from simkv.incident.remedies import Remedy, RemedySearch
from simkv.incident.server_setup import ServerSetup
from simkv.incident.wait_summary import (
    MAX_WAIT_SHARE,
    WaitSummary,
    find_victims,
    is_healthy,
    server_verdicts,
    slowdown,
    summarize_waits,
)
from simkv.incident.workload_rebuild import is_sampled
from simkv.metrics.run_result import RunResult


@dataclass(frozen=True)
class IncidentAnswer:
    """The answer: ``summary_lines`` (five), and the whole ``text`` of ``diagnosis.md``.

    ``healthy`` is true if nothing is wrong; ``explained`` is false if the simulation does not
    reproduce the incident. ``cause`` is the name of the verdict or wait; ``remedy`` is the first
    suggested fix.
    """

    summary_lines: tuple[str, ...]
    text: str
    healthy: bool
    explained: bool
    cause: str
    remedy: Remedy | None


def refuse_explanation(
    likeness: ObservedComparison,
    setup: ServerSetup,
    evidence: Evidence,
    notes: Sequence[str],
    beside: pd.DataFrame,
) -> IncidentAnswer:
    """Build the answer for a simulation that does not reproduce the observation.

    It lists missing information. ``beside`` is the table over time.
    """
    missed = "; ".join(
        f"{line.name} {line.simulated:.4g} where {line.observed:.4g} was observed"
        for line in likeness.missed[:3]
    )
    asks = [*setup.assumed, *evidence.lacks] or ["something that is not modelled"]
    five = (
        f"No explanation: the simulation does not reproduce {evidence.source}.",
        f"It differs: {missed}.",
        "What was observed is in observed.png and compared.csv, beside what was simulated.",
        f"Not known, and possibly why: {asks[0]}.",
        f"{len(asks)} such points are listed below; --set engine.NAME=VALUE tells one.",
    )
    text = render_diagnosis(five, likeness, setup, evidence, notes, list(timeline_lines(beside)))
    return IncidentAnswer(five, text, False, False, "not reproduced", None)


def explain_incident(
    result: RunResult,
    observed: pd.DataFrame,
    likeness: ObservedComparison,
    mending: RemedySearch | None,
    setup: ServerSetup,
    evidence: Evidence,
    notes: Sequence[str],
    beside: pd.DataFrame,
) -> IncidentAnswer:
    """Build the answer for a reproduced incident: affected requests, cause and fix."""
    waits, found = summarize_waits(result), server_verdicts(result)
    healthy = is_healthy(result)
    slow = waits.share < MAX_WAIT_SHARE and not found
    cause = "nothing" if healthy else "slow in company" if slow else _cause(found, waits)
    remedy = mending.remedies[0] if mending and mending.remedies and not healthy else None
    five = (
        _what(observed, setup, waits, healthy),
        _whom(observed, waits, healthy, is_sampled(evidence)),
        _slow(result) if slow and not healthy else _why(found, waits, healthy),
        _mends(mending, healthy),
        _trust(likeness, setup),
    )
    rest = [
        *victim_lines(observed, result, waits),
        *verdict_lines(found, waits),
        *(remedy_lines(mending) if mending and not healthy else ()),
        *timeline_lines(beside),
    ]
    text = render_diagnosis(five, likeness, setup, evidence, notes, rest)
    return IncidentAnswer(five, text, healthy, True, cause, remedy)


def _cause(found: Sequence[Verdict], waits: WaitSummary) -> str:
    if found:
        return found[0].name
    return KIND_LABELS[max(waits.kinds, key=lambda kind: waits.kinds[kind])]


def _what(observed: pd.DataFrame, setup: ServerSetup, waits: WaitSummary, healthy: bool) -> str:
    engine = f"{setup.engine['name']} {setup.engine['variant']}"
    count, failed = len(observed), int((observed["output_tokens"] == 0).sum())
    spent = format_seconds(float(observed["t_s"].max() - observed["t_s"].min()))
    head = f"{count} requests within {spent} on {engine}"
    without = f", {failed} without an answer" if failed else ""
    if healthy:
        return f"Nothing is wrong: of {head}{without}, nobody waited for long."
    return f"{head}{without}: {100 * waits.share:.0f} % of all their time was waiting."


def _whom(observed: pd.DataFrame, waits: WaitSummary, healthy: bool, drawn: bool) -> str:
    failed = observed.index[observed["output_tokens"] == 0].tolist()
    if failed:
        return f"Victims: {request_labels(observed, failed)} got no answer."
    if healthy or not waits.victims:
        slowest = int(observed["e2e_ms"].to_numpy(np.float64).argmax())
        took = format_seconds(observed["e2e_ms"].max() / 1e3)
        who = "as drawn" if drawn else request_label(observed, slowest)
        return f"The slowest, {who}, took {took}."
    worst = find_victims(observed, waits.victims)
    if drawn:
        least = format_seconds(float(observed["queue_ms"].loc[worst].min()) / 1e3)
        return f"Victims: nothing tells who; of ten requests as drawn one queued {least} or more."
    queued = float(observed["queue_ms"].loc[worst[0]]) / 1e3
    if queued > 0:
        whole = format_seconds(float(observed["e2e_ms"].loc[worst[0]]) / 1e3)
        most = f"the first of them queued for {format_seconds(queued)} of its {whole}"
        return f"Victims: {request_labels(observed, worst)}; {most}."
    return f"Victims: {request_labels(observed, worst)}."


def _why(found: Sequence[Verdict], waits: WaitSummary, healthy: bool) -> str:
    if healthy:
        return (
            f"Waiting was {100 * waits.share:.1f} % of all time, {100 * waits.worst:.0f} % for the "
            "worst decile."
        )
    if found:
        return f"Cause: {found[0].name}: {found[0].text}."
    total = sum(waits.kinds.values()) or 1e-9
    first = sorted(waits.kinds.items(), key=lambda item: -item[1])[:2]
    said = ", ".join(f"{100 * spent / total:.0f} % {KIND_LABELS[kind]}" for kind, spent in first)
    return f"Cause: of the waiting {said}."


def _slow(result: RunResult) -> str:
    return (
        f"Cause: nobody waits, but requests take {slowdown(result):.1f} times as long as they "
        "would alone, while they are prefilled or decode."
    )


def _mends(mending: RemedySearch | None, healthy: bool) -> str:
    if healthy:
        return "No flag needs to be changed."
    if mending is None:
        return "What would mend it was not asked."
    tried = f"{mending.tried} changes tried" + (
        f", {mending.cut_off} of them cut off" if mending.cut_off else ""
    )
    flags = mending.of("flag")
    others = [*mending.of("version"), *mending.of("memory")]
    if not mending.remedies:
        return f"No flag mends it: none of {tried} helps."
    best = mending.remedies[0]
    if not best.sure:
        return f"No flag is sure to mend it; {describe_remedy(best)} may; {tried}."
    if flags and best.means != "version":
        return f"What mends it: {describe_remedy(flags[0])}; {tried}."
    if flags and flags[0].sure:
        return (
            f"What mends it: {describe_remedy(best)}; of the flags {describe_remedy(flags[0])}; "
            f"{tried}."
        )
    two = [best, *(one for one in others if one is not best)][:2]
    return f"No flag mends it; {' or '.join(describe_remedy(one) for one in two)} would; {tried}."


def _trust(likeness: ObservedComparison, setup: ServerSetup) -> str:
    e2e = next((line for line in likeness.lines if line.name.startswith("E2E mean")), None)
    said = (
        f"E2E mean {e2e.simulated:.4g} s simulated, {e2e.observed:.4g} s observed "
        f"({100 * e2e.relative_error:+.1f} %)"
        if e2e
        else "the simulation agrees with what was observed"
    )
    assumed = f"; {len(setup.assumed)} settings assumed" if setup.assumed else ""
    return f"Trust: {said}{assumed}."
