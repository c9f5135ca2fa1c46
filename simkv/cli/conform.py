"""``simkv conform``, ``policies`` and ``schema``."""

from __future__ import annotations

import json
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from simkv.cli.command_support import AsJson, print_error, print_json, progress
from simkv.core.errors import InputError, spelling_hint

if TYPE_CHECKING:
    from collections.abc import Iterator

    from simkv.conformance.decision_replay import Conformance as TraceResult
    from simkv.conformance.decision_trace import TraceError
    from simkv.report.json_answers import ConformAnswer


def conform(
    files: Annotated[
        list[Path], typer.Argument(help="Files or directories with recordings (.jsonl, .jsonl.gz).")
    ],
    quiet: Annotated[
        bool, typer.Option("--quiet", help="Print only recordings with differences.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Compare decisions with recordings of real engines.

    Exit 1 if a decision differs, 2 for bad input.
    """
    from simkv.conformance.decision_trace import TraceError

    total = bad = different = 0
    traces: list[TraceResult] = []
    unreadable: list[str] = []
    found = _recording_files(files)
    with progress("files", len(found)) as advance:
        for file in found:
            for result in _results(file):
                total += 1
                if isinstance(result, TraceError):
                    print_error(result)
                    bad += 1
                    unreadable.append(str(result))
                    continue
                different += result.difference is not None
                if as_json:
                    traces.append(result)
                elif result.difference or not quiet:
                    print(_trace_report(result))
            advance()
    if as_json:
        print_json(_build_answer(traces, unreadable))
    else:
        print(f"{total - bad - different} of {total} recordings equal")
    if bad or different:
        raise typer.Exit(2 if bad else 1)


def _recording_files(paths: list[Path]) -> list[Path | TraceError]:
    """Return the recording files, and an error for each directory without recordings."""
    from simkv.conformance.decision_trace import TraceError, recording_files

    files: list[Path | TraceError] = []
    for path in paths:
        try:
            files += recording_files(path)
        except TraceError as error:
            files.append(error)
    return files


def _results(file: Path | TraceError) -> Iterator[TraceResult | TraceError]:
    """Yield the result for each recording in a file, or the error if a recording is invalid."""
    from simkv.conformance.decision_replay import check_trace
    from simkv.conformance.decision_trace import TraceError, split_recordings

    if isinstance(file, TraceError):
        yield file
        return
    try:
        recordings = split_recordings(file)
    except TraceError as error:
        yield error
        return
    for recording in recordings:
        try:
            yield check_trace(recording.parse())
        except TraceError as error:
            yield error


def _build_answer(results: list[TraceResult], unreadable: list[str]) -> ConformAnswer:
    """Return the comparisons with recordings; ``unreadable`` lists errors of unreadable files."""
    from simkv.report.json_answers import ConformAnswer, ConformedTrace

    traces = [
        ConformedTrace(
            name=one.name,
            engine=one.engine,
            variant=one.variant,
            steps=one.steps,
            equal=one.difference is None,
            difference=None if one.difference is None else asdict(one.difference),
        )
        for one in results
    ]
    return ConformAnswer(
        traces=traces,
        unreadable=unreadable,
        equal=sum(one.equal for one in traces),
        total=len(traces) + len(unreadable),
    )


def _trace_report(result: TraceResult) -> str:
    """Return ``FILE: ok …``, or the first step that differs with both decisions."""
    engine = f"{result.engine} {result.variant}"
    trust = f"; {result.assumed}" if result.assumed else ""
    found = result.difference
    if found is None:
        return f"{result.name}: ok ({engine}, {result.steps} steps){trust}"
    lines = [f"{result.name}: differs at step {found.step} ({engine}){trust}"]
    for field, recorded in found.recorded.items():
        lines.append(f"  {field}")
        lines.append(f"    recorded:  {json.dumps(recorded)}")
        lines.append(f"    simulated: {json.dumps(found.simulated.get(field))}")
    return "\n".join(lines)


def schema(
    command: Annotated[
        list[str] | None,
        typer.Argument(
            help="Describe the --json output of this command, for example 'plan' or 'profile "
            "list' (default: describe scenario files)."
        ),
    ] = None,
) -> None:
    """Print the JSON schema of scenarios or outputs.

    Editors use the schema of scenario files to complete and check fields. If COMMAND is given,
    print the schema of the output that this command prints with --json.
    """
    if command:
        from simkv.report.json_answers import ANSWERS

        name = " ".join(command)
        if name not in ANSWERS:
            raise InputError(
                f"{name}: not a command with the option --json{spelling_hint(name, ANSWERS)}; "
                f"expected one of {', '.join(ANSWERS)}"
            )
        print(json.dumps(ANSWERS[name].model_json_schema(mode="serialization"), indent=1))
        return
    from simkv.scenario.scenario_schema import json_schema

    print(json.dumps(json_schema(), indent=1))


def policies(as_json: AsJson = False) -> None:
    """List simulated engines and versions with their sources.

    For each version, the output shows whether its rules were compared with decisions recorded from
    the real code, or only read from the source code.
    """
    from simkv.conformance.recording_counts import packaged_counts
    from simkv.schedulers.engine_registry import ENGINES, list_variants

    counts = packaged_counts()
    if as_json:
        from simkv.report.json_answers import build_policies_answer

        print_json(build_policies_answer(counts))
        return
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
        print(
            f"{'':<12}not covered by any recording of {engine}, only read from its source: "
            f"{unrecorded}"
        )
