"""Find steps that took far longer than other steps of the same size because of disturbances.

Stalled steps are excluded from the errors of step times, but not from the metrics of the run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

#: A stall takes more than this factor times the median of its size, and exceeds the median by more
#: than this time (s).
STALL_FACTOR, STALL_EXCESS_S = 3.0, 5e-3
#: Minimum number of steps for the median of a step size.
MIN_STEPS = 5


@dataclass(frozen=True)
class Stall:
    """A step that took far longer than usual: ``seconds`` instead of ``usual_s``.

    ``number`` is the number of the step in its run. ``side`` is ``device`` or ``host``, where most
    of the additional time was spent.
    """

    number: int
    seconds: float
    usual_s: float
    side: str


def find_stalls(rows: Sequence[Mapping[str, str]]) -> list[Stall]:
    """Return the stalled steps in ``passes.csv``.

    The usual duration is the median over the steps with the same padded size.
    """
    of_size: dict[str, list[Mapping[str, str]]] = {}
    for row in rows:
        of_size.setdefault(row.get("size", ""), []).append(row)
    usual = {
        size: (_median(same, "seconds"), _median(same, "gpu_s"))
        for size, same in of_size.items()
        if size and len(same) >= MIN_STEPS
    }
    found = []
    for number, row in enumerate(rows):
        seconds_usual, device_usual = usual.get(row.get("size", ""), (float("inf"), 0.0))
        seconds = float(row["seconds"])
        if seconds > STALL_FACTOR * seconds_usual and seconds > seconds_usual + STALL_EXCESS_S:
            on_device = float(row["gpu_s"]) - device_usual
            side = "device" if on_device > (seconds - seconds_usual) / 2 else "host"
            found.append(Stall(number, seconds, seconds_usual, side))
    return found


def _median(rows: Sequence[Mapping[str, str]], column: str) -> float:
    return median(float(row[column]) for row in rows)
