"""Write predictions to a file."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

from simkv.core.atomic_files import atomic_folder
from simkv.validation.serving_points.point_prediction import Prediction

POINTS = "points.csv"
COLUMNS = (
    *("id", "ttft_ms", "tpot_ms", "ttft_low_ms", "ttft_high_ms", "tpot_low_ms", "tpot_high_ms"),
    *("answered", "why"),
)


def write_points(folder: Path, predictions: Sequence[Prediction]) -> Path:
    """Write ``points.csv`` with a row per prediction and no measured values."""
    with atomic_folder(folder, (POINTS,)) as new, (new / POINTS).open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for p in predictions:
            low, high = p.low, p.high
            ends = [low and low.ttft, high and high.ttft, low and low.tpot, high and high.tpot]
            writer.writerow(
                [
                    p.row.id,
                    *map(_ms, p.latency or (None, None)),
                    *map(_ms, ends),
                    "yes" if p.latency else "no",
                    p.why,
                ]
            )
    return folder / POINTS


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"
