"""``simkv check-scheduler``: does a scheduler of one's own keep the laws?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from simkv.core.errors import InputError
from simkv.core.files import check_new_file, write_text


def check_scheduler(
    file: Annotated[Path, typer.Argument(help="A scheduler of one's own (Python). It is run.")],
    examples: Annotated[int, typer.Option(min=1, help="Random scenarios.")] = 200,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KNOB=VALUE", help="A knob that is not drawn."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", metavar="FILE", help="The counterexample; default <file>-broken.yaml."
        ),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a file that is there.")
    ] = False,
) -> None:
    """Run random scenarios with a scheduler until one breaks a law; write the smallest such one.

    Exit 0 if none does, 1 if one does.
    """
    if not file.is_file():
        raise InputError(f"{file}: there is no such file")
    from simkv.proof.own import check

    there = out or file.with_name(f"{file.stem}-broken.yaml")
    check_new_file("--out", there, file, overwrite)
    found = check(file, examples, dict(map(_knob, set_ or [])))
    if found.broken is None:
        print(f"{file}: kept all laws in {found.scenarios} random scenarios")
        return
    write_text(there, found.to_yaml(there))
    print(found.broken)
    print(f"Shrunk to {there}: simkv run {there} --trust")
    raise typer.Exit(1)


def _knob(given: str) -> tuple[str, Any]:
    from ruamel.yaml import YAML

    name, equals, value = given.partition("=")
    if not equals:
        raise InputError(f"--set {given}: expected KNOB=VALUE, as in watermark=0.1")
    return name.removeprefix("engine."), YAML(typ="safe").load(value)
