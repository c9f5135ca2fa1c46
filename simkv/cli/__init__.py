"""Commands: parse, call, print. A module for each, or for each few that belong together."""

from __future__ import annotations

import os
import sys
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any

import typer

from simkv.cli.common import INTERRUPTED, Interrupted, complain
from simkv.cli.words import Commands, tell_wrong_call
from simkv.core.errors import InputError
from simkv.core.version import __version__, compiled

#: The module of each command, in the order of the help.
COMMANDS = {
    "run": "run",
    "report": "report",
    "explain": "explain",
    "diagnose": "diagnose",
    "sweep": "sweep",
    "plan": "plan",
    "evolve": "evolve",
    "serve": "serve",
    "check-scheduler": "own",
    "export-scheduler": "own",
    "zoo": "zoo",
    "conform": "conform",
    "record": "record",
    "follow": "record",
    "policies": "conform",
    "schema": "conform",
    "calibrate": "lab",
    "profiles": "profiles",
    "blocks": "blocks",
    "shrink": "counterfactual",
    "bisect": "counterfactual",
    "whatif": "counterfactual",
    "trace": "trace",
    "gpu": "lab",
    "validate": "validate",
    "profile": "profile",
}
#: Those that are groups of commands; a module has one, its ``app``.
GROUPS = {"trace", "gpu", "validate", "profile"}

_ABOUT = "A flight simulator for LLM-serving schedulers: who was served when, who starved, why."


@cache
def app_of(word: str = "") -> typer.Typer:
    """The command that ``word`` names, whose module alone is imported, or else all of them."""
    app = typer.Typer(
        no_args_is_help=True,
        cls=Commands,
        rich_markup_mode=None,  # rich takes 0.2 s to import
        pretty_exceptions_enable=False,
        help=_ABOUT,
    )
    app.callback()(options)
    for name in [word] if word in COMMANDS else COMMANDS:
        module = import_module(f"simkv.cli.{COMMANDS[name]}")
        if name in GROUPS:
            app.add_typer(module.app, name=name)
        else:
            app.command()(getattr(module, name.replace("-", "_")))
    return app


if TYPE_CHECKING:
    app: typer.Typer


def __getattr__(name: str) -> Any:
    if name == "app":
        return app_of()
    raise AttributeError(name)


def main() -> None:
    """Parse and run a command: bad input ends in one line and exit code 2, an interrupt in 130."""
    try:
        word = next(iter(_words()), "")
        if word == "plan":
            from simkv.cli.plan import take_options

            take_options(all_of_them=True)
        code = app_of(word)(prog_name="simkv", standalone_mode=False)
    except InputError as error:
        complain(error)
        sys.exit(2)
    except Interrupted as end:
        complain(f"interrupted; {end.kept}")
        raise
    except MemoryError:
        complain("out of memory; use a smaller input or workload")
        sys.exit(2)
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


def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options before the command."""
