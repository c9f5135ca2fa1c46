"""``simkv validate silicon``: compare predictions with published serving points."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from simkv.cli.command_support import progress, show
from simkv.core.atomic_files import check_folder
from simkv.core.errors import InputError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from simkv.validation.serving_points.measured_rows import MeasuredRow
    from simkv.validation.serving_points.point_prediction import Prediction


def validate_silicon(
    rows: Annotated[Path, typer.Argument(metavar="ROWS.csv", help="Table of measured points.")],
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Write the predictions (points.csv) to this directory."),
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(help="Maximum number of processes (default: one per core).")
    ] = None,
) -> None:
    """Compare with published serving points.

    A point is TTFT and TPOT at one concurrency. Each row is simulated as a closed loop with the
    engine's scheduler and the lengths and flags of the benchmark. Without measured columns, only
    predictions are printed.
    """
    from simkv.costs.operators.error_spreads import read_spreads
    from simkv.validation.serving_points.measured_rows import read_rows
    from simkv.validation.serving_points.point_prediction import predict

    _check(out, jobs)
    found = read_rows(rows)
    spreads = read_spreads()
    with progress("points", None) as advance:
        predictions = predict(found, spreads, jobs=jobs, advance=advance)
    show(*_lines(found, predictions))
    if out:
        from simkv.validation.serving_points.prediction_file import write_points

        show(f"Written to {write_points(out, predictions)}")


def _check(out: Path | None, jobs: int | None) -> None:
    if out:
        check_folder("--out", out)
    if jobs is not None and jobs < 1:
        raise InputError(f"--jobs {jobs}: expected 1 or more")


def _lines(rows: list[MeasuredRow], predictions: list[Prediction]) -> Iterator[RenderableType]:
    if any(row.measured for row in rows):
        from simkv.validation.serving_points.point_scores import noise, score_groups
        from simkv.validation.serving_points.point_tables import noise_lines, score_table

        for title, group in score_groups(predictions).items():
            yield score_table(f"by {title}, in percent", group)
        yield from noise_lines(noise(rows))
    answered = sum(p.latency is not None for p in predictions)
    yield f"{answered} of {len(predictions)} rows have a prediction"
