"""``simkv check-scheduler`` and ``export-scheduler``: check and export custom schedulers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from simkv.cli.command_support import AsJson, Overwrite, Trust, print_json, progress
from simkv.core.atomic_files import check_new_file, write_text
from simkv.core.errors import InputError


def check_scheduler(
    file: Annotated[
        Path,
        typer.Argument(
            help="Python file with a custom scheduler, or scenario file (YAML) that uses a custom "
            "scheduler. The Python file is executed."
        ),
    ],
    examples: Annotated[
        int, typer.Option(min=1, metavar="N", help="Number of random scenarios.")
    ] = 200,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KNOB=VALUE",
            help="Value of a scheduler setting in all scenarios; may be repeated.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="FILE",
            help="Write the counterexample to this file (default: <file>-broken.yaml).",
        ),
    ] = None,
    overwrite: Overwrite = False,
    _trusted: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Test a custom scheduler on random scenarios.

    The test checks the result of every scheduler call, reports files that the scheduler reads, and
    repeats runs with other output lengths. It stops at the first violated invariant and writes the
    smallest scenario that violates it. For a scenario file, the test covers all variants with a
    custom scheduler. Exit 0 if no invariant is violated, 1 otherwise.
    """
    if not file.is_file():
        raise InputError(f"{file}: there is no such file")
    if file.suffix in (".yaml", ".yml"):
        _check_scenario(file, set_ or [], as_json)
        return
    from simkv.conformance.custom_scheduler_check import check_laws

    there = out or file.with_name(f"{file.stem}-broken.yaml")
    check_new_file("--out", there, file, overwrite)
    found = check_laws(file, examples, dict(map(_knob, set_ or [])))
    if found.broken is not None:
        write_text(there, found.to_yaml(there))
    if as_json:
        broken = found.broken is not None
        _print_answer(found.scenarios, str(found.broken or ""), str(there) if broken else None)
    elif found.broken is None:
        print(f"{file}: no invariant violated in {found.scenarios} random scenarios")
    else:
        print(found.broken)
        print(f"Counterexample written to {there}: simkv check-scheduler {there} --trust")
    if found.broken is not None:
        raise typer.Exit(1)


def _print_answer(scenarios: int, broken: str, counterexample: str | None) -> None:
    from simkv.report.json_answers import CheckSchedulerAnswer

    print_json(
        CheckSchedulerAnswer(
            ok=not broken, scenarios=scenarios, broken=broken, counterexample=counterexample
        )
    )


def _check_scenario(file: Path, overrides: list[str], as_json: bool) -> None:
    """Check the custom schedulers of a scenario file in its own runs."""
    from simkv.metrics.purity_check import check_scheduler_run
    from simkv.scenario.custom.custom_engine import find_custom_code
    from simkv.scenario.custom.scheduler_laws import LawViolation
    from simkv.scenario.scenario_loader import load

    scenarios = load(file, overrides)
    custom = {n: one for n, one in scenarios.items() if find_custom_code(one.engine)} or scenarios
    for name, scenario in custom.items():
        try:
            check_scheduler_run(scenario, file.parent)
        except LawViolation as error:
            if as_json:
                _print_answer(len(custom), str(error), str(file))
            else:
                print(error)
            raise typer.Exit(1) from None
        if not as_json:
            print(f"{file}, {name}: no invariant violated")
    if as_json:
        _print_answer(len(custom), "", None)


def _knob(given: str) -> tuple[str, Any]:
    from ruamel.yaml import YAML

    name, equals, value = given.partition("=")
    if not equals:
        raise InputError(f"--set {given}: expected NAME=VALUE, such as watermark=0.1")
    return name.removeprefix("engine."), YAML(typ="safe").load(value)


def export_scheduler(
    file: Annotated[
        Path,
        typer.Argument(
            help="Python file that defines a custom policy for vLLM, or a scenario that uses "
            "one. The Python file is executed."
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="FILE",
            help="Write the class to this file (default: <file>_for_vllm.py).",
        ),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KNOB=VALUE", help="Override a setting of the policy; may be repeated."
        ),
    ] = None,
    check: Annotated[
        int,
        typer.Option(
            min=0,
            metavar="N",
            help="Compare decisions with vLLM's own scheduler in N random cases (default: 0).",
        ),
    ] = 0,
    source: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            exists=True,
            help="Wheel file or unpacked wheel of vLLM for --check; must be the newest release "
            "that simkv supports.",
        ),
    ] = None,
    overwrite: Overwrite = False,
) -> None:
    """Export a custom policy as a vLLM scheduler class.

    Use the class with `vllm serve --scheduler-cls`. With --check, simkv runs the class in vLLM's
    own scheduler, without a GPU, and compares every decision with the simulation. Exit 1 if a
    decision differs.
    """
    if not file.is_file():
        raise InputError(f"{file}: there is no such file")
    from simkv.conformance.policy_export import (
        TARGET_RELEASE,
        check_export,
        export_policy,
        scheduler_class_name,
    )
    from simkv.native.release_sources import open_sources

    there = out or file.with_name(f"{file.stem}_for_vllm.py")
    check_new_file("--out", there, file, overwrite)
    knobs = dict(map(_knob, set_ or []))
    text = export_policy(file, knobs, there.stem)
    if check:
        with (
            open_sources("vllm", TARGET_RELEASE, source) as (folder, _),
            progress("cases", check) as advance,
        ):
            for name, mismatch in check_export(file, knobs, folder, check):
                advance()
                if mismatch:
                    print(
                        f"{name}: vLLM {TARGET_RELEASE} makes another decision than the "
                        f"simulation: {mismatch}"
                    )
                    raise typer.Exit(1)
        print(
            f"vLLM {TARGET_RELEASE} and the simulation make the same decisions in {check} "
            "random cases"
        )
    write_text(there, text)
    print(
        f"Written to {there}: vllm serve --scheduler-cls {there.stem}.{scheduler_class_name(text)}"
    )
