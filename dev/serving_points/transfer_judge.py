"""Evaluate whether constants and intervals transfer to other data: ``python -m
dev.serving_points.transfer_judge``.

Each measurement is predicted with constants and an interval that were fitted without its model
(leave one model out) or without its source (leave one source out). The program prints scores by
class for TTFT, TPOT and throughput, for each set of constants, so that the sets can be compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import RenderableType

from dev.serving_points.constant_fit import LADDERS
from dev.serving_points.fit_samples import samples_of
from dev.serving_points.point_calibration import predictions_of, replay_points
from dev.serving_points.source_fit import WAYS, hold_out, left_out_ends
from simkv.cli.command_support import progress, show
from simkv.core.errors import InputError, spelling_hint
from simkv.costs.operators.error_sources import packaged_sources
from simkv.validation.serving_points.closed_loop_replay import PointReplay
from simkv.validation.serving_points.measured_rows import MeasuredRow, read_rows
from simkv.validation.serving_points.point_prediction import Prediction, points_of
from simkv.validation.serving_points.point_scores import score_groups
from simkv.validation.serving_points.point_tables import score_table
from simkv.validation.serving_points.serving_point import ServingPoint

#: Ways to leave out that say how constants and intervals transfer.
JUDGED = ("model", "source")


def judge(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="ROWS.csv", help="Table of server configurations with measured TTFT and TPOT."
        ),
    ],
    constants: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="Sets of constants to judge (default: none, and the packaged set)."
        ),
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(help="Maximum number of processes (default: one per core).")
    ] = None,
) -> None:
    """Print the scores of predictions with one model left out, and with one source left out."""
    names = constants or ["none", str(packaged_sources().provenance["constants by"])]
    for name in names:
        if name not in LADDERS:
            hint = spelling_hint(name, LADDERS)
            raise InputError(f"--constants {name}: expected one of {', '.join(LADDERS)}{hint}")
    rows = read_rows(path)
    if not any(row.measured for row in rows):
        raise InputError(f"{path}: line 1: scores need the columns ttft_ms and tpot_ms")
    points = points_of(rows)
    with progress("points", None) as advance:
        replayed = replay_points(points, jobs=jobs, advance=advance)
    show(*judge_lines(rows, points, replayed, names))


def judge_lines(
    rows: Sequence[MeasuredRow],
    points: Sequence[ServingPoint | str],
    replayed: Sequence[PointReplay | None],
    names: Sequence[str],
) -> Iterator[RenderableType]:
    """Yield a score table for each way of leaving out and each set of constants."""
    for way in JUDGED:
        for name in names:
            found = score_groups(predict_left_out(rows, points, replayed, way, name))["class"]
            yield score_table(f"{way} left out, constants: {name}, in percent", found)


def predict_left_out(
    rows: Sequence[MeasuredRow],
    points: Sequence[ServingPoint | str],
    replayed: Sequence[PointReplay | None],
    way: str,
    name: str,
) -> list[Prediction]:
    """Predict each row with constants and an interval fitted to the other models or sources."""
    samples = samples_of(rows, points, replayed)
    found = hold_out(samples, LADDERS[name])
    own = found.of(way)
    ends = left_out_ends(samples, found, own, WAYS[way])
    return predictions_of(rows, points, samples, own.logs, ends)


if __name__ == "__main__":
    typer.run(judge)
