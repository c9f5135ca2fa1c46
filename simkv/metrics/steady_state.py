"""Check whether the load of a run reached a steady state.

The time in which requests arrive is divided into thirds. The mean number of requests in flight must
not grow from the middle to the last third. A run that is short compared with the duration of its
requests is not steady.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from simkv.sim.run_record import RunRecord

Floats = npt.NDArray[np.float64]

#: Minimum length of the time in which requests arrive, in mean request durations.
MIN_DURATIONS = 5.0
#: Maximum ratio of the mean number of requests in flight in the last third to the mean in the
#: middle third. A higher ratio is accepted only within the random variation of the means.
MAX_GROWTH = 1.2
#: Number of intervals into which a third is divided to estimate the variation of its mean.
PARTS = 10
#: Number of standard errors within which two means are not distinguishable.
STANDARD_ERRORS = 2.0


@dataclass(frozen=True)
class SteadyState:
    """Whether a run reached a steady state (None: not applicable), with an explanation ``text``.

    ``grows`` is true if the number of requests in flight kept growing while requests arrived.
    """

    steady: bool | None
    text: str
    grows: bool = False


def check_steady_state(record: RunRecord) -> SteadyState:
    """Return whether the number of requests in flight is stable while requests arrive."""
    lives = list(record.requests.values())
    arrivals = np.array(sorted(life.request.arrival for life in lives))
    ends = np.array(
        sorted(record.end if life.ended_at is None else life.ended_at for life in lives)
    )
    span = float(arrivals[-1] - arrivals[0]) if len(arrivals) else 0.0
    if span <= 0:
        return SteadyState(None, "not applicable; all requests arrive at once")
    duration = float((ends.sum() - arrivals.sum()) / len(arrivals))
    edges = arrivals[0] + span * np.linspace(1 / 3, 1, 2 * PARTS + 1)
    held = [_mean_in_flight(arrivals, ends, a, b) for a, b in pairwise(edges)]
    middle, last = np.array(held[:PARTS]), np.array(held[PARTS:])
    grown = float(last.mean() / max(middle.mean(), 1e-9))
    error = float(np.hypot(middle.std(ddof=1), last.std(ddof=1)) / np.sqrt(PARTS))
    shown = f"{middle.mean():.3g} requests in flight in the middle third, {last.mean():.3g} in the "
    if grown > MAX_GROWTH and last.mean() - middle.mean() > STANDARD_ERRORS * error:
        # If the arrivals grew as much and each request takes as long as before, the capacity is not
        # exceeded.
        longer = _duration_growth(record, float(edges[0]), float(edges[PARTS]))
        if longer <= MAX_GROWTH and _arrival_growth(arrivals, edges) * MAX_GROWTH >= grown:
            return SteadyState(
                False,
                f"not reached; {shown}last, because the arrivals vary; use more requests "
                "(--num-prompts)",
            )
        return SteadyState(
            False,
            f"not reached; {shown}last: the load exceeds the capacity or still builds up",
            grows=True,
        )
    if span < MIN_DURATIONS * duration:
        return SteadyState(
            False,
            f"not reached; requests arrive for only {span:.3g} s, less than {MIN_DURATIONS:g} "
            f"times the mean duration of a request ({duration:.3g} s); use more requests "
            "(--num-prompts)",
        )
    return SteadyState(True, f"reached; {shown}last")


def _arrival_growth(arrivals: Floats, edges: Floats) -> float:
    """Return the number of arrivals in the last third, relative to the middle third."""
    early, late = np.histogram(arrivals, edges[[0, PARTS, 2 * PARTS]])[0].tolist()
    return float(late) / max(float(early), 1.0)


def _duration_growth(record: RunRecord, begin: float, middle: float) -> float:
    """Return the mean duration of requests that arrive after ``middle`` (s), relative to the mean
    duration of requests that arrive between ``begin`` and ``middle``.
    """
    early, late = list[float](), list[float]()
    for life in record.requests.values():
        arrival = life.request.arrival
        if arrival >= begin:
            end = record.end if life.ended_at is None else life.ended_at
            (late if arrival > middle else early).append(end - arrival)
    if not early or not late:
        return float("inf")
    return float(np.mean(late) / max(float(np.mean(early)), 1e-9))


def _mean_in_flight(
    arrivals: Floats,
    ends: Floats,
    start: float,
    end: float,
) -> float:
    """Return the mean number of requests in flight between two times."""

    def present(times: Floats) -> float:
        return float(np.maximum(end - np.maximum(times, start), 0.0).sum())

    return (present(arrivals) - present(ends)) / (end - start)
