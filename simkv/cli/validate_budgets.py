"""``simkv validate budgets``: profiles asked for a token budget that they were not fitted at."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from simkv.cli.common import progress, show
from simkv.core.errors import InputError


def validate_budgets(
    calibration: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Kernel tables in folders of their own, as truth too."),
    ] = None,
) -> None:
    """Fit to requests alone at one token budget, predict a load at every other.

    The truth is made: of devices that are planted, and of those that kernel tables describe.
    """
    from simkv.proof.validation.budgets.devices import of_tables, planted
    from simkv.proof.validation.budgets.pairs import pairs_of, table

    if calibration and not calibration.is_dir():
        raise InputError(f"--calibration {calibration}: there is no such folder")
    devices = [*planted(), *(of_tables(calibration) if calibration else [])]
    found = []
    with progress("devices", len(devices)) as advance:
        for device in devices:
            found += list(pairs_of(device))
            advance()
    show("Error of the mean E2E in per cent:", *table(found))
