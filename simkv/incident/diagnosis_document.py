"""Write ``diagnosis.md``: the five-line answer and the evidence for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pandas as pd

from simkv.core.figure_registry import format_seconds
from simkv.core.markdown_text import escape_markdown
from simkv.explain.ledger_kinds import COMPUTE_KINDS, KIND_LABELS
from simkv.explain.verdicts.verdict import Verdict
from simkv.explain.wait_ledger import total_by_kind
from simkv.incident.evidence import Evidence
from simkv.incident.incident_timeline import HEAD, timeline_cells
from simkv.incident.log_summary import LogSummary
from simkv.incident.measured_answer import listed_section
from simkv.incident.observed_comparison import ObservedComparison
from simkv.incident.remedies import Remedy, RemedySearch
from simkv.incident.server_setup import ServerSetup
from simkv.incident.wait_summary import WaitSummary, find_victims
from simkv.metrics.run_result import RunResult

#: Maximum number of remedies and victims listed.
MAX_NAMED = 10
METHOD = (
    "The 90 % intervals are computed by resampling the requests of all scenarios that were "
    "simulated with and without the change. These scenarios are the likely reconstructions of "
    "the workload. They also include simulations with step times scaled down and up by the "
    "error of the profile, if these reproduce the incident."
)


def request_label(observed: pd.DataFrame, row: int) -> str:
    """Return the label of a request, such as ``request 3 (cmpl-1a2b)``."""
    name = observed.loc[row].get("request")
    return f"request {row} ({name})" if isinstance(name, str) else f"request {row}"


def request_labels(observed: pd.DataFrame, rows: Sequence[int], most: int = 3) -> str:
    """Return the labels of the first ``most`` requests, and the number of further requests."""
    first = ", ".join(request_label(observed, row) for row in rows[:most])
    return first + (f" and {len(rows) - most} more" if len(rows) > most else "")


def victim_lines(observed: pd.DataFrame, result: RunResult, waits: WaitSummary) -> Iterator[str]:
    """Yield Markdown lines about the requests that waited longest, and their blockers."""
    if not waits.victims:
        return
    yield "## Victims"
    yield ""
    yield "| request | arrived (s) | prompt | output | waited (s) | most of it |"
    yield "| --- | --- | --- | --- | --- | --- |"
    begin = observed["t_s"].iloc[0]
    for i in find_victims(observed, waits.victims)[:MAX_NAMED]:
        tiles = [tile for tile in result.diagnosis.ledger[i] if tile.kind not in COMPUTE_KINDS]
        sums = total_by_kind(tiles)
        kind = max(sums, key=lambda one: sums[one], default=None)
        row = observed.loc[i]
        most = KIND_LABELS[kind] if kind else ""
        yield (
            f"| {escape_markdown(request_label(observed, i))} | {row['t_s'] - begin:.2f} | "
            f"{row['prompt_tokens']:.0f} | {row['output_tokens']:.0f} | "
            f"{sum(sums.values()):.2f} | {most} |"
        )
    yield ""
    blockers = result.diagnosis.blockers[: MAX_NAMED // 2]
    if blockers:
        held = ", ".join(
            f"{request_label(observed, b.id)} ({format_seconds(b.seconds)})" for b in blockers
        )
        yield f"The resources for which they waited were mainly held by {escape_markdown(held)}."
        yield ""


def verdict_lines(found: Sequence[Verdict], result: RunResult) -> Iterator[str]:
    """Yield Markdown lines about the verdicts, and about the time of all requests by kind."""
    yield "## Where the time went"
    yield ""
    for verdict in found:
        yield f"- {verdict.name}: {escape_markdown(verdict.text)}"
    kinds = total_by_kind(tile for tiles in result.diagnosis.ledger.values() for tile in tiles)
    total = sum(kinds.values()) or 1.0
    for kind, spent in sorted(kinds.items(), key=lambda item: -item[1]):
        yield f"- {KIND_LABELS[kind]}: {format_seconds(spent)} ({100 * spent / total:.1f} %)"
    yield ""


def remedy_lines(mending: RemedySearch) -> Iterator[str]:
    """Yield Markdown lines about the changes that help and their side effects."""
    yield "## What would have helped"
    yield ""
    if mending.remedies:
        yield "| change | effect | sure | side effects | other effects |"
        yield "| --- | --- | --- | --- | --- |"
        for remedy in mending.remedies[:MAX_NAMED]:
            gained: str = remedy.effect.judgement
            if remedy.gain:
                gained = ". ".join(filter(None, (remedy.gain.told, remedy.gain.compared)))
            sure = "yes" if remedy.sure else "no"
            cells = (_change(remedy), gained, sure, _cost(remedy), _told(remedy))
            yield f"| {' | '.join(map(escape_markdown, cells))} |"
        yield ""
        yield f"{METHOD} {_worlds(mending)}"
    else:
        yield f"None of the {mending.tried} simulated changes would have helped."
    yield ""
    yield f"- {mending.tried} changes were simulated; {mending.bounds.told}."
    if mending.cut_off:
        yield f"- {mending.cut_off} changes left requests unserved by then and are not fixes."
    if mending.skipped:
        left = ", ".join(f"{change.field} {change.after}" for change in mending.skipped)
        yield (
            "- Not simulated, because smaller changes of the same setting already served fewer "
            f"requests: {escape_markdown(left)}."
        )
    yield ""


def _worlds(mending: RemedySearch) -> str:
    gain = mending.remedies[0].gain
    if gain is None or not gain.worlds:
        return (
            "There was only one scenario, so the intervals do not include the error of the "
            "step times."
        )
    return f"There were {gain.worlds + 1} scenarios."


def describe_remedy(remedy: Remedy) -> str:
    """Return one line of text about a change: its benefit and its side effects."""
    gained = remedy.gain.told if remedy.gain else _told(remedy)
    cost = _cost(remedy)
    return f"{_change(remedy)} ({gained}{f'; {cost}' if cost else ''})"


def _change(remedy: Remedy) -> str:
    return f"a larger cache, {remedy.typed}" if remedy.means == "memory" else remedy.typed


def _cost(remedy: Remedy) -> str:
    """Return the side effects as text, such as ``2 others slower, x1.3 at worst; 1 without an
    answer``.
    """
    cost = remedy.cost
    parts = [f"{cost.slower} others slower, x{cost.worst:.1f} at worst"] if cost.slower else []
    parts += [f"{cost.failed} others without an answer"] if cost.failed else []
    return "; ".join(parts)


def _told(remedy: Remedy) -> str:
    """Return the effect of a change on the run, in the words of ``simkv whatif``."""
    return remedy.effect.sentence.removeprefix(f"{remedy.effect.change}: ")


def timeline_lines(beside: pd.DataFrame) -> Iterator[str]:
    """Yield the lines of a Markdown table of observed and simulated values over time."""
    yield "## Over time, observed / simulated"
    yield ""
    yield f"| {' | '.join(HEAD)} |"
    yield f"|{' --- |' * len(HEAD)}"
    for row in timeline_cells(beside):
        yield f"| {' | '.join(row)} |"
    yield ""


def render_diagnosis(
    five: Sequence[str],
    likeness: ObservedComparison,
    setup: ServerSetup,
    evidence: Evidence,
    notes: Sequence[str],
    rest: Sequence[str],
) -> str:
    """Return the text of ``diagnosis.md``.

    ``five`` contains the five summary lines. ``rest`` contains the sections that explain the
    incident.
    """
    lines = [
        f"# {escape_markdown(evidence.source)}",
        "",
        *(f"{escape_markdown(line)}  " for line in five),
        "",
    ]
    lines += ["![observed and simulated](observed.png)", "", *rest]
    lines += ["## Observed and simulated", ""]
    lines += ["| figure | input | simulated | difference | source | tolerance | agrees |"]
    lines += ["| --- | --- | --- | --- | --- | --- | --- |"]
    for line in likeness.lines:
        agrees = "yes" if line.agrees else "no"
        lines.append(
            f"| {line.name} | {line.observed:.4g} | {line.simulated:.4g} | {line.difference} | "
            f"{line.kind} | {line.tolerance} | {agrees} |"
        )
    lines += ["", "*Measured* figures are from the inputs. *Reconstructed* figures were sampled to"]
    lines += ["agree with them. *Simulated* figures are from the simulation of the reconstruction."]
    lines += ["", "## The server", ""]
    server = {"model": setup.model, "gpu": setup.gpu, "tensor_parallel_size": setup.tp}
    values = server | setup.engine
    lines += [
        f"- {name} {escape_markdown(values[name])} ({escape_markdown(how)})"
        for name, how in setup.sources.items()
        if name in values
    ]
    lines += [f"- assumed: {escape_markdown(one)}" for one in setup.assumed]
    lines += [
        "",
        *listed_section("Notes", notes),
        *listed_section("Missing from the inputs", evidence.lacks),
    ]
    return "\n".join(lines).rstrip() + "\n"


def summary_lines(summary: LogSummary | None) -> Iterator[str]:
    """Yield Markdown lines about the measured metrics of the log."""
    if summary is None:
        return
    yield "## Measured figures"
    yield ""
    yield f"- {escape_markdown(summary.figures)}"
    for finding in summary.findings:
        yield f"- {finding.name}: {escape_markdown(finding.text)}"
    yield ""
