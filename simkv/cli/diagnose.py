"""``simkv diagnose``: find affected requests, cause and fix from the logs of a server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from simkv.cli.command_support import Trust, progress, show
from simkv.core.errors import InputError

if TYPE_CHECKING:
    from simkv.incident.incident_answer import IncidentAnswer
    from simkv.incident.server_setup import UserSettings


def diagnose(
    inputs: Annotated[
        list[Path],
        typer.Argument(
            metavar="INPUT...",
            help="Server logs, OpenTelemetry spans, Prometheus data, benchmark results; or the "
            "directory of an earlier diagnosis.",
        ),
    ],
    engine: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Engine name, if the inputs do not identify it (e.g. vllm)."
        ),
    ] = None,
    version: Annotated[
        str | None,
        typer.Option(help="Engine version, such as 0.11.0, if the inputs do not identify it."),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="GPU name, such as H100-SXM, if the inputs do not identify it."
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Model name, if the inputs do not identify it."),
    ] = None,
    tp: Annotated[int | None, typer.Option(min=1, help="Tensor parallel size.")] = None,
    dp: Annotated[int | None, typer.Option(min=1, help="Data parallel size.")] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="engine.NAME=VALUE",
            help="Engine setting that the inputs do not show; may be repeated.",
        ),
    ] = None,
    columns: Annotated[
        str | None,
        typer.Option(
            metavar="OURS=THEIRS,...",
            help="Columns of your own CSV or JSON lines file of requests, such as "
            "arrival=ts,prompt_tokens=in,output_tokens=out,ttft_ms=ttft,e2e_ms=total.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Write results to this directory (default: diagnosis/)."),
    ] = None,
    until: Annotated[
        int,
        typer.Option(
            min=1,
            max=4,
            metavar="STAGE",
            help="Last stage to run: 1 read, 2 rebuild, 3 calibrate, 4 explain.",
        ),
    ] = 4,
    try_flags: Annotated[
        bool, typer.Option(help="Simulate changes of the engine's flags to find a fix.")
    ] = True,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Maximum number of processes (default: one per core).")
    ] = None,
    _trusted: Trust = False,
) -> None:
    """Diagnose an incident from a server's logs.

    Rebuild the incident as a simulation and report the affected requests, the cause and a fix. All
    results are files in one directory that may be edited: given that directory as INPUT, existing
    files are used as they are. Exit 0 if nothing is wrong, 3 if something is, 1 if the incident
    could not be reproduced, 2 for bad input.
    """
    from simkv.incident import diagnose_stages
    from simkv.incident import incident_folder as files
    from simkv.incident.evidence import UndeterminedError
    from simkv.incident.server_setup import UserSettings

    asked = UserSettings(engine, version, gpu, model, tp, dp, _overrides(set_ or []))
    resumed = len(inputs) == 1 and files.is_incident(inputs[0])
    target = out or (inputs[0] if resumed else Path("diagnosis"))
    if resumed:
        if target != inputs[0]:
            raise InputError(
                f"--out {target}: cannot be combined with a resumed run; "
                f"results stay in {inputs[0]}"
            )
    else:
        files.check_incident_folder(target)
        _read(inputs, target, columns)
    try:
        found = _diagnosed(target, asked, until, jobs, try_flags)
    except UndeterminedError as reason:
        found = diagnose_stages.summarize_stage(target, reason)
    written = f"Written to {target}: {', '.join(sorted(p.name for p in target.iterdir()))}"
    if found is None:
        show(written)
        return
    show(*found.summary_lines)
    show(f"\n{written}")
    if not found.healthy:
        raise typer.Exit(3 if found.explained else 1)


def _diagnosed(
    target: Path, asked: UserSettings, until: int, jobs: int | None, try_flags: bool
) -> IncidentAnswer | None:
    """Run the stages after reading; return the answer of the last stage, or None before it."""
    from simkv.incident import diagnose_stages
    from simkv.study.worker_pool import cores

    if until >= 2:
        diagnose_stages.rebuild_stage(target, asked)
    if until >= 3:
        with progress("simulations") as advance:
            diagnose_stages.calibrate_stage(target, asked, lambda done, total: advance(done, total))
    if until < 4:
        return None
    with progress("runs") as advance:
        return diagnose_stages.explain_stage(
            target,
            asked,
            workers=jobs or cores(),
            tell=lambda done, expected: advance(done, expected),
            try_flags=try_flags,
        )


def _read(inputs: list[Path], target: Path, columns: str | None) -> None:
    from simkv.incident.diagnose_stages import read_stage
    from simkv.incident.mapped_records import parse_record_columns

    mapped = None if columns is None else parse_record_columns(columns)
    with progress("reading", file=max(inputs, key=_size)) as advance:
        read_stage(inputs, target, lambda done: advance(done), mapped)


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _overrides(assignments: list[str]) -> dict[str, Any]:
    """Return assignments ``engine.NAME=VALUE`` as values by name."""
    found: dict[str, Any] = {}
    for text in assignments:
        path, sign, value = text.partition("=")
        head, _, name = path.strip().partition(".")
        if not sign or head != "engine" or not name:
            raise InputError(f"--set {text}: expected engine.NAME=VALUE")
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    return found
