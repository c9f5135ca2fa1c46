"""``simkv diagnose``: from what a production server wrote to the victim, the cause and the flag."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from simkv.cli.common import Trust, progress, show
from simkv.core.errors import InputError


def diagnose(
    inputs: Annotated[
        list[Path],
        typer.Argument(
            metavar="INPUT...",
            help="Logs, spans, a client's results; or the folder of an earlier diagnosis.",
        ),
    ],
    engine: Annotated[str | None, typer.Option(help="Where no source tells it: vllm.")] = None,
    version: Annotated[str | None, typer.Option(help="Of the engine, such as 0.11.0.")] = None,
    gpu: Annotated[str | None, typer.Option(help="By name: H100-SXM.")] = None,
    model: Annotated[str | None, typer.Option(help="By name, where no source tells it.")] = None,
    tp: Annotated[int | None, typer.Option(min=1, help="GPUs that share every layer.")] = None,
    dp: Annotated[int | None, typer.Option(min=1, help="Data-parallel ranks behind it.")] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="engine.NAME=VALUE", help="A setting of the engine."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for what is found; default diagnosis/.")
    ] = None,
    until: Annotated[
        int, typer.Option(min=1, max=4, help="1 reads, 2 rebuilds, 3 calibrates, 4 explains.")
    ] = 4,
    flags: Annotated[
        bool, typer.Option(help="Try what each flag of the engine would have changed.")
    ] = True,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Processes at most; default one per core.")
    ] = None,
    _trusted: Trust = False,
) -> None:
    """Read what a server wrote, rebuild the incident, and say whom it hit, why, and what mends it.

    The answer begins with five lines; all of it is in the folder, as files that can be changed:
    given that folder again, what is there is not made anew. Exit 0 if nothing is wrong, 3 if
    something is, 1 if the incident could not be reproduced, 2 for bad input.
    """
    from simkv.ingest import folder as files
    from simkv.ingest import stages
    from simkv.ingest.engine import Asked
    from simkv.search.pool import cores

    asked = Asked(engine, version, gpu, model, tp, dp, _overrides(set_ or []))
    resumed = len(inputs) == 1 and files.is_incident(inputs[0])
    target = out or (inputs[0] if resumed else Path("diagnosis"))
    if resumed:
        if target != inputs[0]:
            raise InputError(f"--out {target}: {inputs[0]} is gone on with where it lies")
    else:
        files.check_incident_folder(target)
        _read(inputs, target)
    if until >= 2:
        stages.rebuild_stage(target, asked)
    if until >= 3:
        with progress("simulations") as advance:
            stages.calibrate_stage(target, asked, lambda done, total: advance(done, total))
    if until < 4:
        show(f"Written to {target}: {', '.join(sorted(p.name for p in target.iterdir()))}")
        return
    with progress("runs") as advance:
        found = stages.explain_stage(
            target,
            asked,
            workers=workers or cores(),
            tell=lambda done, expected: advance(done, expected),
            try_flags=flags,
        )
    show(*found.five)
    show(f"\nWritten to {target}: {', '.join(sorted(p.name for p in target.iterdir()))}")
    if not found.healthy:
        raise typer.Exit(3 if found.explained else 1)


def _read(inputs: list[Path], target: Path) -> None:
    from simkv.ingest.stages import read_stage

    with progress("reading", file=max(inputs, key=_size)) as advance:
        read_stage(inputs, target, lambda done: advance(done))


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _overrides(assignments: list[str]) -> dict[str, Any]:
    """``engine.NAME=VALUE`` by name."""
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
