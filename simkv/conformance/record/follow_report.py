"""Write a Markdown report about the rules that a new release uses."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields

from simkv.conformance.decision_trace import DecisionTrace
from simkv.conformance.record.release_follower import FollowResult, UnexplainedCase
from simkv.core.recording_format import RecordingLine
from simkv.schedulers.engine_registry import ENGINES


def headline(release: str, newest: str, found: FollowResult) -> str:
    """Return a one-line result for a ``release``, such as ``vLLM 0.33.0``.

    Rules that differ from the release ``newest`` are listed.
    """
    if found.broken:
        return f"{release} cannot be run: {found.broken}"
    if found.like:
        *more, last = found.like
        releases = " and ".join([", ".join(more), last] if more else [last])
        return f"{release} uses the rules of {releases}"
    if found.changed:
        ways = " or with ".join(_changes(changed) for changed in found.changed)
        return f"{release} uses new rules, namely the rules of {newest} with {ways}"
    return f"{release} differs from every combination of known rules"


def render_follow_report(release: str, newest: str, found: FollowResult) -> str:
    """Return a Markdown page with the result, the number of cases and any unexplained case."""
    lines = [f"# {headline(release, newest, found)}", ""]
    lines.append(f"{found.cases} random cases, {found.steps:,} steps of the unmodified scheduler.")
    if found.unexplained:
        lines += ["", *_unlike(found.unexplained)]
    return "\n".join([*lines, ""])


def _changes(changed: Mapping[str, bool]) -> str:
    return ", ".join(f"`{rule}: {str(value).lower()}`" for rule, value in changed.items())


def _unlike(unlike: UnexplainedCase) -> Iterator[str]:
    header = unlike.trace.header
    yield f"## Case {unlike.name}, reduced"
    yield ""
    yield f"Settings: {_knobs(unlike.trace)}"
    yield ""
    fields = dict.fromkeys(name for request in header["requests"] for name in request)
    yield f"| {' | '.join(fields)} |"
    yield f"| {' | '.join('---' for _ in fields)} |"
    for request in header["requests"]:
        yield f"| {' | '.join(_shown(request, name) for name in fields)} |"
    yield ""
    if aborts := header.get("aborts"):
        yield f"Aborts (step, phase, request): {json.dumps(aborts)}"
        yield ""
    found = unlike.difference
    yield f"The closest rules are the rules of {unlike.nearest}, up to step {found.step}:"
    yield ""
    yield "| field | recorded | simulated |"
    yield "| --- | --- | --- |"
    for name in sorted(found.recorded.keys() | found.simulated.keys()):
        yield f"| {name} | {_shown(found.recorded, name)} | {_shown(found.simulated, name)} |"


def _shown(line: RecordingLine, name: str) -> str:
    return json.dumps(line[name]) if name in line else ""


def _knobs(trace: DecisionTrace) -> str:
    """Return the settings of a recording that differ from their defaults, as text."""
    recording = ENGINES[trace.header["engine"]].recording
    config = recording.config(trace.header)
    plain = {field.name: field.default for field in fields(config)}
    given = {knob: value for knob, value in asdict(config).items() if plain[knob] != value}
    return ", ".join(f"{knob} {json.dumps(value)}" for knob, value in given.items())
