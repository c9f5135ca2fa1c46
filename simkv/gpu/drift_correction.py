"""Correct a campaign's measurements for drift of the device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from simkv.gpu.campaign import Measurement

#: Ratio to its own scatter above which a change of the sentinel counts.
SIGNIFICANT_DRIFT = 3.0
#: A repeat stalled if it took this factor times the median of its point, and this excess (s).
STALL_FACTOR, STALL_EXCESS_S = 3.0, 5e-3


def measure_drift(samples: Sequence[Measurement]) -> float:
    """Return the relative change of the sentinel over the campaign, by a linear fit.

    0 if the change is within the scatter, or there are fewer than four measurements.
    """
    line = _line(samples)
    return 0.0 if line is None else line[1] / line[0] - 1.0


def correct_drift(samples: Sequence[Measurement]) -> list[Measurement]:
    """Return the measurements scaled to the end of the campaign, as the device is in service."""
    line = _line(samples)
    if line is None:
        return list(samples)
    first, last = line
    begin, end = _span(samples)
    found = []
    for sample in samples:
        then = first + (last - first) * (sample.at_s - begin) / (end - begin)
        share = last / then
        found.append(
            sample._replace(
                median_s=share * sample.median_s,
                p10_s=share * sample.p10_s,
                p90_s=share * sample.p90_s,
            )
        )
    return found


def count_stalled(samples: Sequence[Measurement]) -> int:
    """Return the number of points with a stalled repeat; their median is used."""
    return sum(
        s.most_s > max(STALL_FACTOR * s.median_s, s.median_s + STALL_EXCESS_S) for s in samples
    )


def _line(samples: Sequence[Measurement]) -> tuple[float, float] | None:
    """Return the sentinel's seconds at its first and its last time, by a linear fit."""
    seen = [s for s in samples if s.key.startswith("sentinel")]
    if len(seen) < 4:
        return None
    at = np.array([s.at_s for s in seen])
    seconds = np.array([s.median_s for s in seen])
    slope, base = np.polyfit(at, seconds, 1)
    first, last = (float(base + slope * end) for end in _span(samples))
    scatter = float(np.std(seconds - (base + slope * at)))
    sure = abs(last - first) > SIGNIFICANT_DRIFT * scatter * (12 / len(seen)) ** 0.5
    return (first, last) if sure and min(first, last) > 0 else None


def _span(samples: Sequence[Measurement]) -> tuple[float, float]:
    """Return the times of the first and the last sentinel."""
    at = [s.at_s for s in samples if s.key.startswith("sentinel")]
    return min(at), max(at)
