"""``simkv record`` and ``follow``: record a release's decisions and determine its rules."""

from __future__ import annotations

import time
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from simkv.cli.command_support import progress

if TYPE_CHECKING:
    from simkv.conformance.decision_trace import DecisionTrace
    from simkv.conformance.record.engine_drivers import EngineDriver
    from simkv.conformance.record.recording_case import RecordingCase

RecordedEngineArgument = Annotated[
    Literal["vllm", "sglang", "trtllm"], typer.Argument(help="Engine name.")
]
FollowedEngineArgument = Annotated[Literal["vllm", "sglang"], typer.Argument(help="Engine name.")]
Version = Annotated[str, typer.Argument(help="Engine version, such as 0.33.0, or newest.")]
SourceOption = Annotated[
    Path | None,
    typer.Option(
        metavar="PATH",
        exists=True,
        help="Wheel or unpacked wheel of the engine (default: the installed package; if there "
        "is none, pip downloads the release).",
    ),
]
Cases = Annotated[int, typer.Option(min=1, help="Number of random cases.")]
Seed = Annotated[int, typer.Option(min=0, help="Random seed of the generated cases.")]
#: End of the name of a file with several recordings.
PACKED = ".jsonl.gz"

TimeLimit = Annotated[
    float,
    typer.Option(
        min=1, metavar="SECONDS", help="Start no further case after this time in seconds."
    ),
]


def _names(driven: EngineDriver, version: str, cases: int, seed: int) -> list[str]:
    """Return the names of the random cases of a seed; different seeds have different cases."""
    earlier = {*driven.form.names(version, cases * seed)}
    return [name for name in driven.form.names(version, cases * (seed + 1)) if name not in earlier]


def _check(out: Path) -> None:
    """Raise InputError if recordings cannot be written to the file or directory ``out``."""
    from simkv.core.atomic_files import check_file, check_folder

    if out.name.endswith(PACKED):
        check_file("--out", out)
    else:
        check_folder("--out", out)


def _write(out: Path, traces: Collection[DecisionTrace]) -> None:
    """Write recordings to one file, or to files in a directory."""
    from simkv.conformance.decision_trace import pack_traces
    from simkv.core.atomic_files import make_folder, write_bytes

    if out.name.endswith(PACKED):
        write_bytes(out, pack_traces(traces))
        return
    make_folder(out)
    for trace in traces:
        write_bytes(out / f"{trace.name}.jsonl.gz", pack_traces([trace]))


def record(
    engine: RecordedEngineArgument,
    version: Version,
    out: Annotated[
        Path,
        typer.Option(
            metavar="PATH",
            help="Write the recordings to this directory, or to one file if it ends in .jsonl.gz.",
        ),
    ],
    cases: Cases = 200,
    seed: Seed = 0,
    time_limit: TimeLimit = 3600,
    source: SourceOption = None,
    keep: Annotated[
        bool,
        typer.Option(
            "--keep",
            help="Write all recordings of hand-written cases. Of the random cases, write only "
            "small recordings that together cover every rule.",
        ),
    ] = False,
) -> None:
    """Record the decisions of an engine's own scheduler.

    The simulation must make the same decisions; exit 1 if a decision differs.
    """
    from simkv.conformance.record.engine_drivers import ENGINE_DRIVERS, prepare_case
    from simkv.conformance.record.recording_selection import choose
    from simkv.conformance.record.release_follower import describe_crash
    from simkv.conformance.record.rule_inference import find_mismatch
    from simkv.core.errors import InputError
    from simkv.native.release_sources import open_sources

    driven = ENGINE_DRIVERS[engine]
    _check(out)
    with (
        open_sources(driven.native.package, version, source) as (folder, found),
        driven.native.stub_imports(folder),
    ):
        names = [*_names(driven, found, cases, seed), *driven.form.handmade(found)]
        traces: dict[str, DecisionTrace] = {}
        end = time.monotonic() + time_limit
        with progress("cases", len(names)) as advance:
            for name in names:
                if traces and time.monotonic() > end:
                    break
                case = prepare_case(driven, found, name, folder)
                try:
                    traces[name] = driven.record(case, found, name)
                except Exception as error:  # a release may have changed in any way
                    why = f"{engine} {found} cannot be run: {describe_crash(name, error)}"
                    if traces:
                        _write(out, traces.values())
                        why += f"; {len(traces)} earlier recordings are in {out}"
                    raise InputError(why) from error
                advance()
    base = driven.native.variant_of(found)
    rules = driven.rules_of(base)
    recorded = list(traces)
    different = [name for name, trace in traces.items() if find_mismatch(trace, rules)]
    if keep and not different:
        kept = [
            *driven.form.handmade(found),
            *choose(rules, driven.seen(base), traces, driven.form.shown),
        ]
        traces = {name: traces[name] for name in dict.fromkeys(kept)}
    _write(out, traces.values())
    steps = sum(len(trace.steps) for trace in traces.values())
    print(f"{engine} {found}: {len(traces)} recordings of {steps:,} steps in {out}")
    if len(recorded) < len(names):
        print(f"stopped after {time_limit:g} s with {len(recorded)} of {len(names)} cases")
    equal = len(recorded) - len(different)
    print(f"the rules of {base} reproduce {equal} of {len(recorded)} recordings")
    if different:
        raise typer.Exit(1)


def follow(
    engine: FollowedEngineArgument,
    version: Version,
    cases: Cases = 200,
    seed: Seed = 0,
    time_limit: TimeLimit = 300,
    source: SourceOption = None,
    report: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write the result as a Markdown page.")
    ] = None,
) -> None:
    """Find the known rules that a new release uses.

    simkv compares the new release with each earlier release. Exit 1 if no earlier release makes the
    same decisions.
    """
    from simkv.conformance.record import follow_report as words
    from simkv.conformance.record.engine_drivers import (
        ENGINE_DRIVERS,
        interleave_kinds,
        prepare_case,
    )
    from simkv.conformance.record.release_follower import follow as follow_release
    from simkv.conformance.record.rule_inference import distinct_releases
    from simkv.core.atomic_files import check_file, write_bytes
    from simkv.native.release_sources import open_sources

    driven = ENGINE_DRIVERS[engine]
    if report is not None:
        check_file("--report", report)
    with (
        open_sources(driven.native.package, version, source) as (folder, found),
        driven.native.stub_imports(folder),
    ):
        names = interleave_kinds(_names(driven, found, cases, seed))
        drawn = {name: prepare_case(driven, found, name, folder) for name in names}
        with progress("cases", len(drawn)) as advance:

            def recorded(case: RecordingCase, name: str) -> DecisionTrace:
                advance()
                return driven.record(case, found, name)

            followed = follow_release(engine, driven.form, drawn, recorded, time_limit)
    newest = next(iter(distinct_releases(engine)))
    page = words.render_follow_report(f"{driven.native.title} {found}", newest, followed)
    if report is not None:
        write_bytes(report, page.encode())
    print(page.removeprefix("# "), end="")
    if followed.cases < len(drawn) and not followed.broken:
        print(f"Stopped after {time_limit:g} s with {followed.cases} of {len(drawn)} cases.")
    if not followed.known:
        raise typer.Exit(1)
