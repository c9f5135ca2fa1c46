"""Command line interface: one module per command or group of related commands."""

from __future__ import annotations

import os
import sys
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any

import typer

from simkv.cli.command_support import INTERRUPTED, Interrupted, print_error
from simkv.cli.renamed_options import use_new_names
from simkv.cli.usage_errors import Commands, print_usage_error
from simkv.core.errors import InputError
from simkv.core.version import __version__, is_compiled

#: Commands by heading of the help, in order, with the module of each.
HEADINGS = {
    "Run and explain": {
        "run": "run",
        "init": "init",
        "compare": "compare",
        "diff": "diff",
        "explain": "explain",
        "report": "report",
        "diagnose": "diagnose",
        "zoo": "zoo",
    },
    "Plan and search": {
        "plan": "plan",
        "sweep": "sweep",
        "whatif": "counterfactual",
        "bisect": "counterfactual",
        "shrink": "counterfactual",
        "evolve": "evolve",
        "blocks": "blocks",
    },
    "Connect servers and data": {
        "serve": "serve",
        "trace": "trace",
        "profile": "profile",
        "calibrate": "calibrate",
        "schema": "conform",
        "export-scheduler": "check_scheduler",
    },
    "Verify": {
        "validate": "validate",
        "gpu": "gpu",
        "conform": "conform",
        "check-scheduler": "check_scheduler",
    },
    "Maintain recordings": {
        "record": "record",
        "follow": "record",
        "policies": "conform",
    },
}
#: Module of each command, in the order of the help.
COMMANDS = {name: module for group in HEADINGS.values() for name, module in group.items()}
#: Commands that are groups; the module of a group has one ``app``.
GROUPS = {"trace", "gpu", "validate", "profile"}

#: Environment variable set by a shell that requests completions.
_ASKED_TO_COMPLETE = "_SIMKV_COMPLETE"
_ABOUT = (
    "Simulate the schedulers of LLM-serving engines. Find out which requests wait, for how "
    "long, and why."
)


@cache
def build_app(word: str = "") -> typer.Typer:
    """Build the app with only the module of the command ``word``, or with all commands."""
    app = typer.Typer(
        no_args_is_help=True,
        cls=Commands,
        rich_markup_mode=None,  # rich takes 0.2 s to import
        pretty_exceptions_enable=False,
        help=_ABOUT,
    )
    app.callback()(global_options)
    for name in [word] if word in COMMANDS else COMMANDS:
        module = import_module(f"simkv.cli.{COMMANDS[name]}")
        heading = next(title for title, group in HEADINGS.items() if name in group)
        if name in GROUPS:
            app.add_typer(module.app, name=name, rich_help_panel=heading)
        else:
            command = getattr(module, name.replace("-", "_"))
            app.command(rich_help_panel=heading)(command)
    return app


if TYPE_CHECKING:
    app: typer.Typer


def __getattr__(name: str) -> Any:
    if name == "app":
        return build_app()
    raise AttributeError(name)


def main() -> None:
    """Parse and run a command; exit with code 2 on bad input and 130 on an interrupt."""
    try:
        words, notice = use_new_names(_words())
        word = next(iter(words), "")
        if notice and _ASKED_TO_COMPLETE not in os.environ:
            print_error(f"note: {notice}")
        if word == "plan":
            from simkv.cli.plan import select_options

            select_options(all_of_them=True)
        code = build_app(word)(words, prog_name="simkv", standalone_mode=False)
    except InputError as error:
        print_error(error)
        sys.exit(2)
    except Interrupted as end:
        print_error(f"interrupted; {end.kept}")
        raise
    except MemoryError:
        print_error("out of memory; use a smaller input or workload")
        sys.exit(2)
    except Exception as error:
        if not hasattr(error, "format_message"):  # identifies click's errors
            raise
        print_usage_error(error)
        sys.exit(2)
    if code == INTERRUPTED:  # typer's exit code for an interrupt
        print_error("interrupted; nothing was written")
    sys.exit(code)


def _words() -> list[str]:
    """Return the words after the program's name, also when a shell requests completions."""
    typed = os.environ.get("_TYPER_COMPLETE_ARGS") or os.environ.get("COMP_WORDS")
    return typed.split()[1:] if typed and _ASKED_TO_COMPLETE in os.environ else sys.argv[1:]


def _version(wanted: bool) -> None:
    if wanted:
        print(f"simkv {__version__} ({'compiled' if is_compiled() else 'pure Python'})")
        raise typer.Exit


def global_options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options before the command."""
