"""Fit the packaged constants: ``python -m dev.serving_points ROWS.csv simkv/costs/operators``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import RenderableType

from dev.serving_points.fit_tables import fit_table, left_out_table
from dev.serving_points.point_calibration import Calibrated, calibrate, write
from dev.serving_points.points_page import write_page
from simkv.cli.command_support import progress, show
from simkv.core.atomic_files import check_folder, make_folder
from simkv.core.errors import InputError
from simkv.validation.serving_points.measured_rows import read_rows


def fit(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="ROWS.csv",
            help="Table of server configurations with measured TTFT and TPOT.",
        ),
    ],
    folder: Annotated[
        Path,
        typer.Argument(metavar="DIR", help="Directory of constants.json and error_sources.json."),
    ],
    report: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a report to this Markdown file.")
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(help="Maximum number of processes (default: one per core).")
    ] = None,
) -> None:
    """Fit constants for each kind of configuration to measured rows, and evaluate them on held-out
    rows.
    """
    check_folder("DIR", folder)
    if report:
        check_folder("--report", report.parent)
    rows = read_rows(path)
    if not any(row.measured for row in rows):
        raise InputError(f"{path}: line 1: a fit needs the columns ttft_ms and tpot_ms")
    with progress("points", None) as advance:
        found = calibrate(rows, path.name, jobs=jobs, advance=advance)
    show(*_fit_lines(found))
    make_folder(folder)
    write(folder, found)
    show(f"Written to {folder}: constants.json, error_sources.json")
    if report:
        make_folder(report.parent)
        command = f"make calibrate-silicon ROWS={path.name}"
        show(f"Written to {report.parent}: {', '.join(write_page(report, found, command))}")


def _fit_lines(found: Calibrated) -> Iterator[RenderableType]:
    yield fit_table(found.fitted)
    yield left_out_table("left out by configuration", found.samples, found.fitted.configurations)
    yield left_out_table("left out by model and GPU", found.samples, found.fitted.groups)
    for name, (ttft, tpot, points) in found.covered.items():
        yield (
            f"90 % intervals of left-out {name} hold {100 * ttft:.1f} % (TTFT) and "
            f"{100 * tpot:.1f} % (TPOT) of {points} measurements"
        )


if __name__ == "__main__":
    typer.run(fit)
