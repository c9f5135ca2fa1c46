"""Evaluate profiles at token budgets other than the budget of the fit: ``python -m
dev.token_budgets``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dev.token_budgets.budget_pairs import pairs_of, table
from dev.token_budgets.known_devices import of_tables, planted
from simkv.cli.command_support import progress, show
from simkv.core.errors import InputError


def validate_budgets(
    kernel_tables: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Directory of kernel tables that serve as additional ground truth.",
        ),
    ] = None,
) -> None:
    """Test profiles at token budgets other than the budget of the fit.

    A profile is fitted to requests in isolation at one token budget, and predicts a load at all
    other budgets. The ground truth is synthetic: devices with made-up costs, and devices described
    by kernel tables.
    """
    if kernel_tables and not kernel_tables.is_dir():
        raise InputError(f"--kernel-tables {kernel_tables}: there is no such folder")
    devices = [*planted(), *(of_tables(kernel_tables) if kernel_tables else [])]
    found = []
    with progress("devices", len(devices)) as advance:
        for device in devices:
            found += list(pairs_of(device))
            advance()
    show("Error of the mean E2E in per cent:", *table(found))


if __name__ == "__main__":
    typer.run(validate_budgets)
