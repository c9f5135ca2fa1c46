"""A campaign's measurements as a device would have given them that does not change meanwhile."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from simkv.gpu.campaign import Measurement

#: A change of the sentinel counts if it is so many times its own scatter.
SIGNIFICANT_DRIFT = 3.0
#: A repeat stalled if it took so many times the median of its point, and so much more (s).
STALL_FACTOR, STALL_EXCESS_S = 3.0, 5e-3


def measure_drift(samples: Sequence[Measurement]) -> float:
    """The change of the sentinel from its first measurement to its last, on the straight line
    through all; 0 where it is not beyond their scatter, or there are fewer than four."""
    line = _line(samples)
    return 0.0 if line is None else line[1] / line[0] - 1.0


def correct_drift(samples: Sequence[Measurement]) -> list[Measurement]:
    """All of them as if measured at the end of the campaign, when the device is as in service."""
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
    """Points of which a repeat stalled; the median of the others is what counts."""
    return sum(
        s.most_s > max(STALL_FACTOR * s.median_s, s.median_s + STALL_EXCESS_S) for s in samples
    )


def _line(samples: Sequence[Measurement]) -> tuple[float, float] | None:
    """The sentinel's seconds at its first and its last time, by the line through all of them."""
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
    """When the first sentinel was measured and when the last."""
    at = [s.at_s for s in samples if s.key.startswith("sentinel")]
    return min(at), max(at)
