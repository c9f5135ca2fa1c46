"""Answers from measured metrics alone: the triage of a log, and the summary of its findings.

    evidence = read_inputs([Path("server.log")])
    for line in triage_lines(evidence, summarize_log(evidence)):
        print(line)

This module does not use the simulator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from simkv.core.engine_version import find_version, is_since
from simkv.core.errors import InputError
from simkv.core.markdown_text import escape_markdown
from simkv.incident.evidence import INFERRED, Evidence, StatedSetting, UndeterminedError
from simkv.incident.log_summary import LogSummary
from simkv.incident.mapped_records import is_mapped, read_mapped
from simkv.incident.missing_requests import add_missing_requests
from simkv.incident.source_join import join
from simkv.incident.source_reader import log_reader, read_sources

if TYPE_CHECKING:
    from simkv.incident.remedies import Remedy


@dataclass(frozen=True)
class IncidentAnswer:
    """Answer of a diagnosis.

    ``text`` is the content of ``diagnosis.md``. ``healthy`` is true if no problem was found.
    ``explained`` is false if the simulation does not reproduce the incident. ``cause`` is the name
    of the verdict, kind of waiting or finding that explains the incident. ``remedy`` is the first
    suggested fix.
    """

    summary_lines: tuple[str, ...]
    text: str
    healthy: bool
    explained: bool
    cause: str
    remedy: Remedy | None


def summarize_measured(summary: LogSummary, evidence: Evidence, reason: str) -> IncidentAnswer:
    """Return the answer from measured metrics alone.

    ``reason`` states the missing information.
    """
    problems = summary.problems
    healthy = not problems
    state = "no problem in the measured figures" if healthy else problems[0].name
    findings = [finding.text for finding in summary.findings]
    fix = "none needed" if healthy else problems[0].advice or "none tested"
    five = (
        f"Result: {state} ({summary.figures}).",
        f"Affected: {summary.affected}; the inputs do not identify requests.",
        f"Cause: {'none' if healthy else problems[0].name}"
        + (f"; {'; '.join(findings)}." if findings else "."),
        f"Fix: {fix}; the workload was not reconstructed.",
        f"Confidence: all metrics are measured, none is simulated; {reason}.",
    )
    text = render_summary(five, evidence)
    return IncidentAnswer(
        five, text, healthy, True, "nothing" if healthy else problems[0].name, None
    )


def read_inputs(
    inputs: Sequence[Path],
    advance: Callable[[int], None] | None = None,
    columns: Mapping[str, str] | None = None,
) -> Evidence:
    """Read and join all sources.

    ``columns`` is for custom request files (see ``mapped_records``). Raises InputError if a source
    cannot be used.
    """
    mapped = [path for path in inputs if columns and is_mapped(path, columns)]
    if columns and not mapped:
        raise InputError(
            f"--columns: none of {', '.join(map(str, inputs))} has a column "
            f"{' or '.join(columns.values())}"
        )
    parts = [read_mapped(path, columns) for path in mapped if columns]
    parts += read_sources([path for path in inputs if path not in mapped], advance)
    return add_missing_requests(join(parts))


def check_age(evidence: Evidence) -> None:
    """Raise UndeterminedError if the logged version of the engine is too old to be simulated."""
    reader, version = log_reader(evidence.engine), evidence.settings.get("version")
    if reader is None or reader.OLDEST is None or version is None:
        return
    found = find_version(str(version.value))
    if found is not None and not is_since(str(version.value), reader.OLDEST):
        raise UndeterminedError(
            f"the log was written by {reader.TITLE} {version.value} ({version.where}), which is "
            f"too old for a simulation; supported versions: {reader.OLDEST} and later"
        )


def with_inferred(evidence: Evidence, summary: LogSummary | None) -> Evidence:
    """Return the evidence, completed with settings that follow from the findings."""
    inferred = [one.inferred for one in summary.findings if one.inferred] if summary else []
    added = {
        name: StatedSetting(value, INFERRED)
        for name, value in inferred
        if name not in evidence.settings
    }
    return replace(evidence, settings={**evidence.settings, **added}) if added else evidence


def triage_lines(evidence: Evidence, summary: LogSummary | None) -> Iterator[str]:
    """Yield a line for the measured metrics, then one line per finding, causes before effects."""
    if summary is None:
        yield (
            f"Triage of {evidence.source}: the log contains no statistics lines; the simulation "
            "may find more."
        )
        return
    yield f"Triage of {evidence.source}, from the log lines alone:"
    for finding in summary.findings:
        advice = f" -> {finding.advice}" if finding.advice else ""
        yield f"- {finding.name}: {finding.text}{advice}"
    if not summary.findings:
        yield "- no problem in the measured metrics"
    yield f"- measured: {summary.figures}"
    try:
        check_age(evidence)
    except UndeterminedError as reason:
        yield f"- too old: {reason}"


def render_summary(five: Sequence[str], evidence: Evidence) -> str:
    """Return the text of ``diagnosis.md`` for an answer from measured metrics alone."""
    lines = [f"# {escape_markdown(evidence.source)}", ""]
    lines += [*(f"{escape_markdown(line)}  " for line in five), "", "## The server", ""]
    lines += [
        f"- {name} {escape_markdown(known.value)} ({escape_markdown(known.where)})"
        for name, known in evidence.settings.items()
    ]
    lines += [
        "",
        *listed_section("Notes", evidence.notes),
        *listed_section("Missing", evidence.lacks),
    ]
    return "\n".join(lines).rstrip() + "\n"


def listed_section(title: str, items: Sequence[str]) -> list[str]:
    """Return a Markdown section with the items as a list, or no lines without items."""
    return (
        [f"## {title}", "", *(f"- {escape_markdown(item)}" for item in items), ""] if items else []
    )
