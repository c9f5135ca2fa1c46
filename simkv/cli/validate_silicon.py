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
    rows: Annotated[Path, typer.Argument(metavar="ROWS.csv", help="Measured points.")],
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write the predictions: points.csv.")
    ] = None,
    docs: Annotated[
        Path | None, typer.Option(metavar="FILE", help="With --fit: write the report.")
    ] = None,
    fit: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Fit constants.json and spreads.json, and write them."),
    ] = None,
    jobs: Annotated[int | None, typer.Option(help="Processes; else one for each core.")] = None,
) -> None:
    """Replay published serving points (TTFT, TPOT at a concurrency), and compare.

    Each row is served in a closed loop by its engine's scheduler with the lengths and flags of its
    benchmark. Without measured columns there are predictions only. With --fit, constants for kinds
    of configurations are fitted to the measured rows and judged on those left out.
    """
    from simkv.costs.operators.spreads import read_spreads
    from simkv.proof.validation.silicon.predict import predict
    from simkv.proof.validation.silicon.rows import read_rows

    _check(out, docs, fit, jobs)
    found = read_rows(rows)
    if fit:
        if not any(row.measured for row in found):
            raise InputError(f"{rows}: line 1: --fit needs the columns ttft_ms and tpot_ms")
        _fit(rows, found, fit, docs, jobs)
        return
    spreads = read_spreads()
    with progress("points", None) as advance:
        predictions = predict(found, spreads, jobs=jobs, advance=advance)
    show(*_lines(found, predictions))
    if out:
        from simkv.proof.validation.silicon.files import write_points

        show(f"Written to {write_points(out, predictions)}")


def _check(out: Path | None, docs: Path | None, fit: Path | None, jobs: int | None) -> None:
    for option, folder in (("--out", out), ("--docs", docs and docs.parent), ("--fit", fit)):
        if folder:
            check_folder(option, folder)
    if docs and not fit:
        raise InputError("--docs: the report is of what --fit left out; give both")
    if docs and docs.is_dir():
        raise InputError(f"--docs {docs}: is a folder; expected a file")
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
    path: Path, rows: list[MeasuredRow], folder: Path, docs: Path | None, jobs: int | None
) -> None:
    from simkv.proof.validation.silicon.calibrate import calibrate, write

    with progress("points", None) as advance:
        found = calibrate(rows, path.name, jobs=jobs, advance=advance)
    show(*_fit_lines(found))
    make_folder(folder)
    write(folder, found)
    show(f"Written to {folder}: constants.json, spreads.json")
    if docs:
        from simkv.proof.validation.silicon.page import write_page

        make_folder(docs.parent)
        command = f"make calibrate-silicon ROWS={path.name}"
        show(f"Written to {docs.parent}: {', '.join(write_page(docs, found, command))}")


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
