"""Find the busiest period of a trace."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from simkv.core.errors import InputError
from simkv.workload.trace_reader import cached_trace
from simkv.workload.trace_selection import Selection

_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


def parse_duration(text: str, option: str) -> float:
    """Return the seconds of a duration such as ``90``, ``30m`` or ``1h``.

    Raises InputError for any other text.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
    if not match or match[2] not in _UNITS or not float(match[1]):
        raise InputError(f"{option} {text}: expected a duration such as 90s, 30m or 1h")
    return float(match[1]) * _UNITS[match[2]]


def find_peak_start(path: Path, seconds: float) -> tuple[float, int]:
    """Return the start (s) of the period with the most arrivals, and the number of arrivals in it.

    ``seconds`` is the length of the period. Raises InputError if the trace cannot be read or has no
    arrival times.
    """
    trace = cached_trace(path.resolve(), Selection(), "auto")
    if not trace.timed:
        raise InputError(
            f"{path}: contains no arrival times, so the busiest period cannot be determined; "
            "omit --peak"
        )
    arrivals = np.sort(np.asarray(trace.rows.arrival, dtype=np.float64))
    counts = np.searchsorted(arrivals, arrivals + seconds, "left") - np.arange(len(arrivals))
    best = int(np.argmax(counts))
    return float(arrivals[best]), int(counts[best])
