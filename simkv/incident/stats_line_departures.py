"""Times at which requests leave the queue and the server, from the counts in statistics lines."""

from __future__ import annotations

from heapq import heappop, heappush

import numpy as np
import numpy.typing as npt

from simkv.incident.log_windows import LogWindows

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
#: Minimum ratio of a request's duration after and before its end is moved, and the resolution of an
#: interval.
MIN_DURATION_SHARE, GRID_POINTS = 0.25, 201
#: Time before and after the log for which the time per token is extrapolated (s).
CLOCK_MARGIN_S = 1e5


def token_clock(cut: LogWindows, pace: Floats) -> tuple[Floats, Floats]:
    """Return times (s), and the number of tokens that a running request emits until each time.

    ``pace`` contains the seconds per token in each interval.
    """
    begin, last = float(cut.begin[0]), float(cut.end[-1])
    times = np.concatenate([[begin - CLOCK_MARGIN_S, begin], cut.end, [last + CLOCK_MARGIN_S]])
    emitted = np.cumsum(np.diff(times) / np.concatenate([pace[:1], pace, pace[-1:]]))
    return times, np.concatenate([[0.0], emitted]) - emitted[0]


def match_completions(
    cut: LogWindows,
    pace: Floats,
    came: Floats,
    first: Floats,
    end: Floats,
) -> tuple[Floats, Floats]:
    """Move the end times of requests so that the number of requests in the system matches the log.

    Return the output tokens and the end times. The order of the end times does not change. ``came``
    contains all arrivals, including those of requests that still wait when the log ends.
    """
    arrived = np.searchsorted(came, cut.end, "right").astype(np.float64)
    present = cut.running + np.nan_to_num(cut.waiting)
    done = np.maximum.accumulate(np.clip(arrived - present, 0.0, None))
    wanted = np.diff(done, prepend=0.0).astype(np.int64)
    moved, alive, place = end.copy(), list[tuple[float, int]](), 0
    order = np.argsort(first, kind="stable")
    owed = 0
    before = float(np.searchsorted(came, cut.begin[0]))
    for window, count in enumerate(wanted.tolist()):
        low, high = float(cut.begin[window]), float(cut.end[window])
        owed += count
        grown = float(present[window]) - before
        before = float(present[window])
        for at in departure_times(came, low, high, grown, owed).tolist():
            while place < len(order) and (first[order[place]] <= at or not alive):
                if first[order[place]] > high:
                    break
                heappush(alive, (float(end[order[place]]), int(order[place])))
                place += 1
            if not alive:
                break
            _, i = heappop(alive)
            least = first[i] + MIN_DURATION_SHARE * (end[i] - first[i])
            moved[i] = min(max(at, float(least)), max(high, float(first[i])))
            owed -= 1
        while place < len(order) and first[order[place]] <= high:
            heappush(alive, (float(end[order[place]]), int(order[place])))
            place += 1
    for _, i in alive:  # requests that end after the log
        moved[i] = max(moved[i], float(cut.end[-1]))
    times, clock = token_clock(cut, pace)
    tokens = np.interp(moved, times, clock) - np.interp(first, times, clock) + 1
    return np.maximum(tokens, 1.0), moved


def admission_times(cut: LogWindows, came: Floats, counts: Ints) -> Floats:
    """Return the times at which requests leave the queue, in order.

    ``counts`` is the number of requests in each interval. Requests that already run when the log
    begins leave the queue when they arrive.
    """
    waiting = np.nan_to_num(cut.waiting)
    grown = np.diff(waiting, prepend=float(cut.initial_waiting))
    windows = zip(
        cut.begin.tolist(), cut.end.tolist(), grown.tolist(), counts.tolist(), strict=True
    )
    found = np.concatenate([departure_times(came, *window) for window in windows])
    early = max(int(np.searchsorted(came, cut.begin[0])) - cut.initial_waiting, 0)
    found[:early] = came[:early]
    return found


def departure_times(came: Floats, low: float, high: float, grown: float, count: int) -> Floats:
    """Return ``count`` times between ``low`` and ``high`` at which requests leave, in order.

    The number of requests present grows by ``grown`` at a constant rate.
    """
    grid = np.linspace(low, high, GRID_POINTS)
    done = np.searchsorted(came, grid, "right") - np.searchsorted(came, low, "right")
    done = np.maximum.accumulate(done - grown * np.linspace(0.0, 1.0, GRID_POINTS))
    done = done + (count - done[-1])
    places = np.searchsorted(done, np.arange(count) + 0.5, "left")
    return np.asarray(grid[np.minimum(places, GRID_POINTS - 1)])
