"""``simkv diagnose``: find affected requests, cause and fix from the logs of a server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from simkv.cli.command_support import Trust, progress, show
from simkv.core.errors import InputError


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
    from simkv.incident.server_setup import UserSettings
    from simkv.study.worker_pool import cores

    asked = UserSettings(engine, version, gpu, model, tp, dp, _overrides(set_ or []))
    resumed = len(inputs) == 1 and files.is_incident(inputs[0])
    target = out or (inputs[0] if resumed else Path("diagnosis"))
    if resumed:
        if target != inputs[0]:
            raise InputError(f"--out {target}: {inputs[0]} is gone on with where it lies")
    else:
        files.check_incident_folder(target)
        _read(inputs, target)
    if until >= 2:
        diagnose_stages.rebuild_stage(target, asked)
    if until >= 3:
        with progress("simulations") as advance:
            diagnose_stages.calibrate_stage(target, asked, lambda done, total: advance(done, total))
    if until < 4:
        show(f"Written to {target}: {', '.join(sorted(p.name for p in target.iterdir()))}")
        return
    with progress("runs") as advance:
        found = diagnose_stages.explain_stage(
            target,
            asked,
            workers=jobs or cores(),
            tell=lambda done, expected: advance(done, expected),
            try_flags=try_flags,
        )
    show(*found.summary_lines)
    show(f"\nWritten to {target}: {', '.join(sorted(p.name for p in target.iterdir()))}")
    if not found.healthy:
        raise typer.Exit(3 if found.explained else 1)


def _read(inputs: list[Path], target: Path) -> None:
    from simkv.incident.diagnose_stages import read_stage

    with progress("reading", file=max(inputs, key=_size)) as advance:
        read_stage(inputs, target, lambda done: advance(done))


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
