"""``simkv validate silicon``: parse, call, print."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from simkv.cli.common import progress, show
from simkv.core.errors import InputError
from simkv.core.files import check_folder, make_folder

if TYPE_CHECKING:
    from rich.console import RenderableType

    from simkv.proof.validation.silicon.calibrate import Calibrated
    from simkv.proof.validation.silicon.predict import Prediction
    from simkv.proof.validation.silicon.rows import MeasuredRow


def validate_silicon(
    rows: Annotated[Path, typer.Argument(metavar="ROWS.csv", help="Table of measured points.")],
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Write the predictions (points.csv) to this directory."),
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="With --fit: write a report to this Markdown file."),
    ] = None,
    fit: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Fit constants.json and spreads.json and write them to this directory.",
        ),
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(help="Maximum number of processes (default: one per core).")
    ] = None,
) -> None:
    """Compare with published serving points.

    A point is TTFT and TPOT at a concurrency. Each row is simulated in a closed loop with its
    engine's scheduler and the lengths and flags of its benchmark. Without measured columns only
    predictions are printed. With --fit, constants per kind of configuration are fitted to the
    measured rows and evaluated on held-out rows.
    """
    from simkv.costs.operators.spreads import read_spreads
    from simkv.proof.validation.silicon.predict import predict
    from simkv.proof.validation.silicon.rows import read_rows

    _check(out, report, fit, jobs)
    found = read_rows(rows)
    if fit:
        if not any(row.measured for row in found):
            raise InputError(f"{rows}: line 1: --fit needs the columns ttft_ms and tpot_ms")
        _fit(rows, found, fit, report, jobs)
        return
    spreads = read_spreads()
    with progress("points", None) as advance:
        predictions = predict(found, spreads, jobs=jobs, advance=advance)
    show(*_lines(found, predictions))
    if out:
        from simkv.proof.validation.silicon.files import write_points

        show(f"Written to {write_points(out, predictions)}")


def _check(out: Path | None, report: Path | None, fit: Path | None, jobs: int | None) -> None:
    for option, folder in (("--out", out), ("--report", report and report.parent), ("--fit", fit)):
        if folder:
            check_folder(option, folder)
    if report and not fit:
        raise InputError("--report: the report is of what --fit left out; give both")
    if report and report.is_dir():
        raise InputError(f"--report {report}: is a folder; expected a file")
    if jobs is not None and jobs < 1:
        raise InputError(f"--jobs {jobs}: expected 1 or more")


def _lines(rows: list[MeasuredRow], predictions: list[Prediction]) -> Iterator[RenderableType]:
    if any(row.measured for row in rows):
        from simkv.proof.validation.silicon.score import noise, scores
        from simkv.proof.validation.silicon.show import noise_lines, score_table

        for title, group in scores(predictions).items():
            yield score_table(f"by {title}, per cent", group)
        yield from noise_lines(noise(rows))
    answered = sum(p.latency is not None for p in predictions)
    yield f"{answered} of {len(predictions)} rows are answered"


def _fit(
    path: Path, rows: list[MeasuredRow], folder: Path, report: Path | None, jobs: int | None
) -> None:
    from simkv.proof.validation.silicon.calibrate import calibrate, write

    with progress("points", None) as advance:
        found = calibrate(rows, path.name, jobs=jobs, advance=advance)
    show(*_fit_lines(found))
    make_folder(folder)
    write(folder, found)
    show(f"Written to {folder}: constants.json, spreads.json")
    if report:
        from simkv.proof.validation.silicon.page import write_page

        make_folder(report.parent)
        command = f"make calibrate-silicon ROWS={path.name}"
        show(f"Written to {report.parent}: {', '.join(write_page(report, found, command))}")


def _fit_lines(found: Calibrated) -> Iterator[RenderableType]:
    from simkv.proof.validation.silicon.show import fit_table, left_out_table

    yield fit_table(found.fitted)
    yield left_out_table("left out by configuration", found.samples, found.fitted.configurations)
    yield left_out_table("left out by model and GPU", found.samples, found.fitted.groups)
    for name, (ttft, tpot, points) in found.covered.items():
        yield (
            f"90 % intervals of left-out {name} hold {100 * ttft:.1f} % (TTFT) and "
            f"{100 * tpot:.1f} % (TPOT) of {points} measurements"
        )
