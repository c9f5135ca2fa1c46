"""Write a shrunk scenario (without unnecessary requests) as a new file for a bug report."""

from __future__ import annotations

import io
import os
import tempfile
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap

from simkv.core.atomic_files import atomic_file
from simkv.core.version import __version__
from simkv.scenario.run_fields import run_fields
from simkv.scenario.scenario import Scenario
from simkv.scenario.scenario_loader import load
from simkv.study.whatif.outcome_predicate import RunCondition
from simkv.study.whatif.trial_evaluation import evaluate_job, make_trial_job
from simkv.study.whatif.workload_shrinking import ShrunkScenario
from simkv.workload.workload_section import build_clients


def write_shrunk(
    shrunk: ShrunkScenario, wanted: RunCondition, command: str, folder: Path, out: Path | None
) -> str:
    """Return the text of a shrunk scenario file, and write the text to ``out`` if given.

    ``command`` is the command line that created the file. Raises InputError if a run of the new
    file does not show the problem.
    """
    lines = [f"simkv run {'FILE' if out is None else out.name}", *header(shrunk, wanted, command)]
    comment = "".join(f"# {' '.join(line.split())}\n" for line in lines)
    profile = shrunk.scenario.profile
    if profile is not None and profile.endswith(".json"):
        profile = _beside(str((folder / profile).resolve()), out)
    tree = _tree(shrunk, wanted, profile)
    if file := tree["engine"].get("file"):
        tree["engine"]["file"] = _beside(file, out)
    text = comment + _yaml(tree)
    with (
        tempfile.TemporaryDirectory() as scratch,
        atomic_file(out or Path(scratch) / "x.yaml") as new,
    ):
        new.write_text(text, encoding="utf-8", newline="\n")
        found = evaluate_job(make_trial_job(load(new)["run"], new.parent))
        if found != shrunk.after:
            raise AssertionError(
                f"the new scenario file gives another result: {found.summary}; expected "
                f"{shrunk.after.summary}"
            )
    return text


def _yaml(tree: dict[str, Any]) -> str:
    stream, yaml = io.StringIO(), YAML()
    yaml.width = 100
    yaml.dump(tree, stream)
    return stream.getvalue()


def header(shrunk: ShrunkScenario, wanted: RunCondition, command: str) -> list[str]:
    """Return the comment lines that describe the changes and the result."""
    now, before = len(shrunk.numbers), len(shrunk.before.endings)
    drawn = shrunk.original.workload.arrivals
    lines = [
        f"Created by: {command} (simkv {__version__}, {shrunk.runs} runs)",
        f"Result before: {wanted.describe(shrunk.before)}",
        f"Result now: {wanted.describe(shrunk.after)}",
        f"Requests: {before} before, {now} now (originally numbers {_ranges(shrunk.numbers)}).",
    ]
    if shrunk.count_before_simplifying != now:
        lines.append(
            f"{shrunk.count_before_simplifying} requests are sufficient with the original "
            "engine settings and lengths."
        )
    lines.append(
        "Minimal: if any request is removed, the result disappears."
        if shrunk.minimal
        else "Perhaps not minimal: the limit on runs was reached."
    )
    if shrunk.served_in_isolation:
        lines.append(
            "If each request runs in isolation, it is served and the result does not occur."
        )
    lines += [
        f"Changed: {name} from {_word(old)} to {_word(new)}." for name, old, new in shrunk.knobs
    ]
    if (shrunk.scenario.profile or "").endswith(".json"):
        lines.append("The cost profile is a separate file; include it in a bug report.")
    if not build_clients(shrunk.original.workload, shrunk.original.timeout).open:
        lines.append(
            "In the original scenario, arrivals depend on answers; this file contains the "
            "arrivals of one run."
        )
    if drawn is not None:
        lines.append(
            f"The requests were sampled with seed {drawn.seed}; this file has no random part."
        )
    return lines


def _ranges(numbers: Sequence[int]) -> str:
    """Format numbers as ranges: 0, 1, 2, 3, 7 becomes ``0 to 3, 7``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(r[0]) if len(r) == 1 else f"{r[0]} to {r[-1]}" for r in runs)


def _word(value: Any) -> str:
    return "none" if value is None else str(value)


def _beside(path: str, out: Path | None) -> str:
    """Return a path relative to the directory of ``out``, or unchanged without ``out``."""
    return path if out is None else Path(os.path.relpath(path, out.parent.resolve())).as_posix()


def _tree(shrunk: ShrunkScenario, wanted: RunCondition, profile: str | None) -> dict[str, Any]:
    """Return the scenario file as plain data, without values at their defaults."""
    scenario = shrunk.scenario
    run = run_fields(scenario, defaults=False)
    rows = run.pop("workload")["requests"]
    return {
        "name": f"{scenario.name[:93]}-shrunk",
        **({"report": scenario.report} if scenario.report else {}),
        "workload": {"requests": [_in_one_line(row) for row in rows]},
        **run,
        "engine": _engine(scenario),
        **({} if profile is None else {"profile": profile}),
        "expect": {"run": wanted.expectation(shrunk.after)},
    }


def _engine(scenario: Scenario) -> dict[str, Any]:
    engine = scenario.engine
    return {
        knob.name: getattr(engine, knob.name)
        for knob in fields(engine)
        if knob.name in ("name", "variant", "file") or getattr(engine, knob.name) != knob.default
    }


def _in_one_line(row: dict[str, Any]) -> CommentedMap:
    line = CommentedMap(row)
    line.fa.set_flow_style()
    return line
