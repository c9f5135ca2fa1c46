"""Commands: parse, call, print. A module for each, or for each few that belong together."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from simkv.cli import (
    blocks,
    conform,
    counterfactual,
    explain,
    lab,
    plan,
    profile,
    report,
    run,
    sweep,
    trace,
    validate,
    zoo,
)
from simkv.cli.common import INTERRUPTED, Interrupted, complain
from simkv.core.errors import InputError
from simkv.core.version import __version__

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="A flight simulator for LLM-serving schedulers: who was served when, who starved, why.",
)
app.command()(run.run)
app.command()(report.report)
app.command()(explain.explain)
app.command()(sweep.sweep)
app.command()(plan.plan)
app.add_typer(counterfactual.app)
app.command()(zoo.zoo)
app.command()(conform.conform)
app.command()(conform.policies)
app.command()(conform.schema)
app.add_typer(trace.app, name="trace")
app.add_typer(lab.app, name="gpu")
app.command()(lab.calibrate)
app.add_typer(validate.app, name="validate")
app.add_typer(profile.app, name="profile")
app.command()(blocks.blocks)


def main() -> None:
    """Entry point: bad input ends in one message and exit code 2, an interrupt in 130."""
    try:
        plan.take_options(all_of_them=sys.argv[1:2] == ["plan"])
        app()
    except InputError as error:
        complain(error)
        sys.exit(2)
    except SystemExit as end:  # typer turns an interrupt into this
        if end.code == INTERRUPTED:
            kept = end.kept if isinstance(end, Interrupted) else "nothing was written"
            complain(f"interrupted; {kept}")
        raise
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(1)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"simkv {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options before the command."""
