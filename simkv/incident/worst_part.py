"""Limit a long log to its worst part, so that the reconstruction has a bounded size.

The worst part has the most waiting requests or, if no request waits, the most running requests.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from simkv.core.figure_registry import format_seconds
from simkv.incident.evidence import Evidence, sum_over_ranks

#: Maximum numbers of statistics lines and of counted requests that are reconstructed.
MAX_PART_LINES, MAX_PART_REQUESTS = 720, 5000
#: Beginning of the note about a log whose beginning is not used.
CUT_NOTE = "the log is long: only its worst"
#: Weight of a running request relative to a waiting request in the choice of the worst part.
RUNNING_WEIGHT = 1e-3


def select_worst_part(evidence: Evidence) -> Evidence:
    """Return the evidence within the part of a long log that has the most waiting requests.

    Short logs, data on single requests and scraped metrics are unchanged.
    """
    series = evidence.series
    if series is None or evidence.requests is not None or evidence.histograms:
        return evidence
    summed = sum_over_ranks(series)
    at = summed.index.to_numpy(np.float64)
    lines = min(len(at), MAX_PART_LINES)
    while lines > MAX_PART_LINES // 8 and _requests(evidence.access, at, lines) > MAX_PART_REQUESTS:
        lines //= 2
    if lines >= len(at):
        return evidence
    load = (summed["waiting"] + RUNNING_WEIGHT * summed["running"]).to_numpy(np.float64)
    sums = np.convolve(np.nan_to_num(load), np.ones(lines), "valid")
    first = int(np.argmax(sums))
    begin = at[first - 1] if first else -np.inf
    end = at[first + lines - 1]
    changed: dict[str, Any] = {}
    for name in ("series", "steps", "access", "arrivals"):
        table = getattr(evidence, name)
        if table is not None:
            inside = (table["t_s"] > begin) & (table["t_s"] <= end)
            changed[name] = table[inside].reset_index(drop=True)
    note = (
        f"{CUT_NOTE} {format_seconds(float(end - at[first]))} are "
        f"reconstructed. They start {format_seconds(float(at[first] - at[0]))} after its first "
        f"line and have {100 * sums[first] / max(load.sum(), 1e-9):.0f} % of all waiting time"
    )
    return replace(evidence, **changed, notes=(*evidence.notes, note))


def _requests(access: pd.DataFrame | None, at: np.ndarray, lines: int) -> float:
    """Return the expected number of accepted requests in a part of the log with ``lines`` lines."""
    return 0.0 if access is None else float(access["accepted"].sum()) * lines / max(len(at), 1)
