"""Write a Markdown report about the rules that a new release uses."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator

from simkv.conformance.record.recording_case import changed_settings
from simkv.conformance.record.release_follower import FollowResult, UnexplainedCase
from simkv.core.recording_format import RecordingLine
from simkv.schedulers.engine_registry import ENGINES


def headline(release: str, newest: str, found: FollowResult) -> str:
    """Return a one-line result; rules that differ from the release ``newest`` are listed."""
    if found.broken:
        return f"{release} cannot be run: {found.broken}"
    if found.like:
        *more, last = found.like
        releases = " and ".join([", ".join(more), last] if more else [last])
        return f"{release} uses the rules of {releases}"
    if found.changed:
        ways = " or with ".join(
            ", ".join(f"`{rule}: {str(value).lower()}`" for rule, value in changed.items())
            for changed in found.changed
        )
        return f"{release} uses new rules, namely the rules of {newest} with {ways}"
    return f"{release} differs from every combination of known rules"


def render_follow_report(release: str, newest: str, found: FollowResult) -> str:
    """Return a Markdown page with the result, the number of cases and any unexplained case."""
    parts = [
        f"# {headline(release, newest, found)}",
        f"{found.cases} random cases, {found.steps:,} steps of the unmodified scheduler.",
    ]
    parts += _describe_case(found.unexplained) if found.unexplained else []
    return "\n\n".join(parts) + "\n"


def _describe_case(case: UnexplainedCase) -> Iterator[str]:
    header, found = case.trace.header, case.difference
    yield f"## Case {case.name}, reduced"
    settings = changed_settings(ENGINES[header["engine"]].recording.config(header))
    yield f"Settings: {', '.join(f'{k} {json.dumps(value)}' for k, value in settings.items())}"
    columns = dict.fromkeys(name for request in header["requests"] for name in request)
    yield _table(columns, [[_shown(line, name) for name in columns] for line in header["requests"]])
    if aborts := header.get("aborts"):
        yield f"Aborts (step, phase, request): {json.dumps(aborts)}"
    yield f"The closest rules are the rules of {case.nearest}, up to step {found.step}:"
    sides, names = (found.recorded, found.simulated), {*found.recorded, *found.simulated}
    rows = [[name, *(_shown(side, name) for side in sides)] for name in sorted(names)]
    yield _table(("field", "recorded", "simulated"), rows)


def _table(columns: Collection[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [columns, ["---" for _ in columns], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _shown(line: RecordingLine, name: str) -> str:
    return json.dumps(line[name]) if name in line else ""
