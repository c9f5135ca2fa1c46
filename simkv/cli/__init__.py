"""Commands: parse, call, print. A module for each, or for each few that belong together."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from simkv.cli import (
    blocks,
    conform,
    counterfactual,
    diagnose,
    evolve,
    explain,
    lab,
    own,
    plan,
    profile,
    profiles,
    record,
    report,
    run,
    serve,
    sweep,
    trace,
    validate,
    zoo,
)
from simkv.cli.common import INTERRUPTED, Interrupted, complain
from simkv.cli.words import Commands, tell_wrong_call
from simkv.core.errors import InputError
from simkv.core.version import __version__, compiled

app = typer.Typer(
    no_args_is_help=True,
    cls=Commands,
    rich_markup_mode=None,  # rich takes 0.2 s to import
    pretty_exceptions_enable=False,
    help="A flight simulator for LLM-serving schedulers: who was served when, who starved, why.",
)
app.command()(run.run)
app.command()(report.report)
app.command()(explain.explain)
app.command()(diagnose.diagnose)
app.command()(sweep.sweep)
app.command()(plan.plan)
app.command()(evolve.evolve)
app.add_typer(counterfactual.app)
app.command()(serve.serve)
app.command()(own.check_scheduler)
app.command()(own.export_scheduler)
app.command()(zoo.zoo)
app.command()(conform.conform)
app.command()(record.record)
app.command()(record.follow)
app.command()(conform.policies)
app.command()(conform.schema)
app.add_typer(trace.app, name="trace")
app.add_typer(lab.app, name="gpu")
app.command()(lab.calibrate)
app.add_typer(validate.app, name="validate")
app.add_typer(profile.app, name="profile")
app.command()(profiles.profiles)
app.command()(blocks.blocks)


def main() -> None:
    """Parse and run a command: bad input ends in one line and exit code 2, an interrupt in 130."""
    try:
        plan.take_options(all_of_them="plan" in _words()[:1])
        code = app(prog_name="simkv", standalone_mode=False)
    except InputError as error:
        complain(error)
        sys.exit(2)
    except Interrupted as end:
        complain(f"interrupted; {end.kept}")
        raise
    except Exception as error:
        if not hasattr(error, "format_message"):  # by which click's errors are known
            raise
        tell_wrong_call(error)
        sys.exit(2)
    if code == INTERRUPTED:  # typer turns an interrupt into this
        complain("interrupted; nothing was written")
    sys.exit(code)


def _words() -> list[str]:
    """The words after the program's name, also while a shell asks how to complete them."""
    typed = os.environ.get("_TYPER_COMPLETE_ARGS") or os.environ.get("COMP_WORDS")
    return typed.split()[1:] if typed and "_SIMKV_COMPLETE" in os.environ else sys.argv[1:]


def _version(wanted: bool) -> None:
    if wanted:
        print(f"simkv {__version__} ({'compiled' if compiled() else 'pure Python'})")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options before the command."""
