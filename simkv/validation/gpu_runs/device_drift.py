"""Drift of the device between runs, measured by timing one fixed step (the sentinel)."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path
from time import time
from typing import NamedTuple

from simkv.core.errors import InputError

#: Label of the sentinel after the last run.
AFTER_LAST_RUN = "the end"
#: Change of the sentinel's duration above which the adjacent run is reported as doubtful.
MAX_DRIFT = 0.02


class Sentinel(NamedTuple):
    """A measurement of the fixed step: its duration in seconds, its Unix time, and the next run's
    name.
    """

    unix_s: float
    before: str
    seconds: float


def note_sentinel(folder: Path, before: str, seconds: float) -> None:
    """Append a measurement of the fixed step to ``folder/sentinels.csv``."""
    path = folder / "sentinels.csv"
    new = not path.exists()
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        if new:
            writer.writerow(Sentinel._fields)
        writer.writerow((f"{time():.3f}", before, seconds))


def read_sentinels(folder: Path) -> list[Sentinel]:
    """Return all measurements of the fixed step in order; empty if there is no file.

    Raises InputError for a damaged file.
    """
    path = folder / "sentinels.csv"
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    try:
        return [Sentinel(float(r["unix_s"]), r["before"], float(r["seconds"])) for r in rows]
    except (KeyError, ValueError, TypeError) as error:
        raise InputError(
            f"{path}: not a file with reference steps written by `simkv gpu validate`: {error}"
        ) from error


def drift_lines(sentinels: Sequence[Sentinel]) -> Iterator[str]:
    """Yield one or two sentences about the drift, or nothing with fewer than two measurements."""
    if len(sentinels) < 2:
        return
    first = sentinels[0].seconds
    changes = [s.seconds / first - 1.0 for s in sentinels[1:]]
    yield (
        f"Drift: a fixed step took {1e3 * first:.3g} ms before the first run; later it changed by "
        f"{100 * min(changes):+.1f} to {100 * max(changes):+.1f} % ({len(changes)} measurements)."
    )
    doubtful = [
        s.before
        for s, change in zip(sentinels[1:], changes, strict=True)
        if abs(change) > MAX_DRIFT
    ]
    if doubtful:
        yield f"It changed by more than {100 * MAX_DRIFT:.0f} % before: {', '.join(doubtful)}."
