"""What became of following a release, in Markdown."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

from simkv.core.recording import Line
from simkv.proof.record.follow import Followed, Unlike
from simkv.proof.record.rules import releases
from simkv.schedulers.vllm.config import VllmConfig


def headline(version: str, found: Followed) -> str:
    """The outcome in one line."""
    if found.broken:
        return f"vLLM {version} cannot be driven: {found.broken}"
    if found.like:
        *more, last = [f"of {name}" for name in found.like]
        rules = " and ".join([", ".join(more), last] if more else [last])
        return f"vLLM {version} decides by the rules {rules}"
    newest = next(iter(releases()))
    if found.changed:
        ways = " or with ".join(_changes(changed) for changed in found.changed)
        return f"vLLM {version} decides by no release's rules: by those of {newest} with {ways}"
    return f"vLLM {version} decides as no combination of the known rules does"


def report(version: str, found: Followed) -> str:
    """A page: the outcome, how it was found, and the first case that nothing explains."""
    lines = [f"# {headline(version, found)}", ""]
    lines.append(f"{found.cases} random cases, {found.steps:,} steps of its unmodified scheduler.")
    if found.unlike:
        lines += ["", *_unlike(found.unlike)]
    return "\n".join([*lines, ""])


def _changes(changed: Mapping[str, bool]) -> str:
    return ", ".join(f"`{rule}: {str(value).lower()}`" for rule, value in changed.items())


def _unlike(unlike: Unlike) -> Iterator[str]:
    header = unlike.trace.header
    yield f"## Case {unlike.name}, made as small as it was found"
    yield ""
    yield f"Knobs: {_knobs(header['config'])}"
    yield ""
    yield "| request | before step | prompt | output | priority | arrival | prompt is made of |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for r in header["requests"]:
        made_of = " ".join(f"{stream}[{a}:{b}]" for stream, a, b in r["prompt_segments"])
        cells = (r["id"], r["arrival_step"], r["prompt_tokens"], r["output_tokens"], r["priority"])
        yield f"| {' | '.join(map(str, cells))} | {r['timestamp']:g} | {made_of} |"
    yield ""
    if aborts := header.get("aborts"):
        yield f"Clients that leave (step, phase, request): {json.dumps(aborts)}"
        yield ""
    found = unlike.difference
    yield f"The rules of {unlike.nearest} go along farthest, to step {found.step}:"
    yield ""
    yield "| field | recorded | simulated |"
    yield "| --- | --- | --- |"
    for name in sorted(found.recorded.keys() | found.simulated.keys()):
        yield f"| {name} | {_shown(found.recorded, name)} | {_shown(found.simulated, name)} |"


def _shown(line: Line, name: str) -> str:
    return json.dumps(line[name]) if name in line else ""


def _knobs(config: Mapping[str, Any]) -> str:
    """Those that are not at their defaults."""
    plain = {field.name: field.default for field in fields(VllmConfig)}
    given = {knob: value for knob, value in config.items() if plain.get(knob) != value}
    return ", ".join(f"{knob} {json.dumps(value)}" for knob, value in given.items())
