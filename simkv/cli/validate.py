"""``simkv validate``: compare simulations with measurements.

simkv validate CASE...                recorded runs of real engines, simulated and compared
simkv validate silicon ROWS.csv       published serving points, replayed and compared
"""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

from simkv.cli.validate_case import validate_case
from simkv.cli.validate_silicon import validate_silicon

#: Command used if none is given.
DEFAULT = "case"


class DefaultCommand(TyperGroup):
    """Command group in which ``simkv validate X`` is short for ``simkv validate case X``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        known = args and (args[0] in self.commands or args[0] in ("--help", "-h"))
        if args and not known and DEFAULT in self.commands:
            args.insert(0, DEFAULT)
        return super().parse_args(ctx, args)


app = typer.Typer(cls=DefaultCommand, no_args_is_help=True)
app.command("case")(validate_case)
app.command("silicon")(validate_silicon)


@app.callback()
def validate() -> None:
    """Compare simulations with measurements."""
