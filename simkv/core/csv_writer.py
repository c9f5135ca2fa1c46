"""Write tables as CSV files."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def write_rows(
    file: Path, rows: Sequence[Mapping[str, Any]], columns: Sequence[str] | None = None
) -> None:
    """Write ``rows`` as CSV. By default, ``columns`` are the keys of the first row.

    If a column contains a float, all numbers in the column are written as floats. None becomes an
    empty cell.
    """
    names = list(columns if columns is not None else rows[0] if rows else ())
    values = [_alike([row[name] for row in rows]) for name in names]
    with file.open("w", newline="", encoding="utf-8") as opened:
        writer = csv.writer(opened, lineterminator="\n")
        writer.writerow(names)
        writer.writerows(zip(*values, strict=True))


def _alike(column: list[Any]) -> list[Any]:
    if float not in set(map(type, column)):
        return column
    return [None if value is None else float(value) for value in column]
