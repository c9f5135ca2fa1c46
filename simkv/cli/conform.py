"""``simkv conform``, ``policies`` and ``schema``."""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from simkv.cli.command_support import print_error, progress

if TYPE_CHECKING:
    from simkv.conformance.decision_replay import Conformance as TraceResult


def conform(
    files: Annotated[list[Path], typer.Argument(help="Decision recordings (.jsonl[.gz]).")],
    quiet: Annotated[bool, typer.Option("--quiet", help="Print only differences.")] = False,
) -> None:
    """Compare decisions with recordings of real engines.

    Exit 1 if a decision differs, 2 for bad input.
    """
    from simkv.conformance.decision_replay import check_trace
    from simkv.conformance.decision_trace import TraceError

    results = []
    bad = 0
    with progress("traces", len(files)) as advance:
        for path in files:
            advance()
            try:
                result = check_trace(path)
            except TraceError as error:
                print_error(error)
                bad += 1
                continue
            results.append(result)
            if result.difference or not quiet:
                print(_trace_report(result))
    different = sum(result.difference is not None for result in results)
    print(f"{len(results) - different} of {len(files)} traces equal")
    if bad or different:
        raise typer.Exit(2 if bad else 1)


def _trace_report(result: TraceResult) -> str:
    """Return ``FILE: ok …``, or the first step that differs with both decisions."""
    engine = f"{result.engine} {result.variant}"
    trust = f"; {result.assumed}" if result.assumed else ""
    found = result.difference
    if found is None:
        return f"{result.path}: ok ({engine}, {result.steps} steps){trust}"
    lines = [f"{result.path}: differs at step {found.step} ({engine}){trust}"]
    for field, recorded in found.recorded.items():
        lines.append(f"  {field}")
        lines.append(f"    recorded:  {json.dumps(recorded)}")
        lines.append(f"    simulated: {json.dumps(found.simulated.get(field))}")
    return "\n".join(lines)


def schema() -> None:
    """Print the JSON schema of scenario files.

    Editors use it to complete and check fields.
    """
    from simkv.scenario.scenario_schema import json_schema

    print(json.dumps(json_schema(), indent=1))


def policies() -> None:
    """List simulated engines and versions with their sources.

    Shows for each whether its decisions were recorded on the real code or only read from source.
    """
    from simkv.conformance.recording_counts import packaged_counts
    from simkv.schedulers.engine_registry import ENGINES, list_variants

    counts = packaged_counts()
    for engine in ENGINES:
        for summary, group in groupby(list_variants(engine).items(), lambda item: item[1].summary):
            for name, variant in group:
                found = counts[engine].get(name)
                recorded = ENGINES[engine].partly_recorded or "recorded on the real code"
                proof = recorded if found else "read from source"
                traces = (
                    f"reproduces {found['equal']} of {found['recorded']} recorded traces"
                    if found
                    else "never recorded"
                )
                print(f"{engine:<12}{name:<24}{proof:<28}{traces}\n{'':<36}{variant.source}")
            print(f"{'':<36}{summary}")
        unrecorded = ENGINES[engine].unrecorded
        print(f"{'':<12}of {engine} in no recording, only read from source: {unrecorded}")
