"""``simkv check-scheduler`` and ``export-scheduler``: a scheduler of one's own, judged and used."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from simkv.cli.common import progress
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


def export_scheduler(
    file: Annotated[
        Path,
        typer.Argument(
            help="A rule over vLLM's decisions: Python, which is run, or a scenario that has one."
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="FILE", help="Default <file>_for_vllm.py."),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KNOB=VALUE", help="A knob of the rule; may be repeated."),
    ] = None,
    check: Annotated[
        int, typer.Option(min=0, help="Compare so many random cases with vLLM's own scheduler.")
    ] = 0,
    source: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            exists=True,
            help="vLLM 0.33.0 for --check: a wheel or its folder.",
        ),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a file that is there.")
    ] = False,
) -> None:
    """Write a rule out as a class for vLLM's --scheduler-cls; exit 1 if a check finds a difference.

    With --check the class is run in the wheel's scheduler, without a GPU, and every decision is
    compared with the simulated one.
    """
    if not file.is_file():
        raise InputError(f"{file}: there is no such file")
    from simkv.proof.export import RELEASE, against, class_in, exported
    from simkv.proof.record.wheel import sources

    there = out or file.with_name(f"{file.stem}_for_vllm.py")
    check_new_file("--out", there, file, overwrite)
    knobs = dict(map(_knob, set_ or []))
    text = exported(file, knobs, there.stem)
    if check:
        with sources("vllm", RELEASE, source) as (folder, _), progress("cases", check) as advance:
            for name, mismatch in against(file, knobs, folder, check):
                advance()
                if mismatch:
                    print(f"{name}: vLLM {RELEASE} decides otherwise: {mismatch}")
                    raise typer.Exit(1)
        print(f"{check} of {check} random cases: vLLM {RELEASE} decides as simulated")
    write_text(there, text)
    print(f"Written to {there}: vllm serve --scheduler-cls {there.stem}.{class_in(text)}")
