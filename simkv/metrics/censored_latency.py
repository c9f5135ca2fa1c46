"""Latency statistics over all requests, including requests that were not served.

Statistics over finished requests favor a variant that serves few requests. Here, a request without
a first token or a complete answer is *censored*, as in survival analysis: its latency is at least
the time it waited.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import ceil, fsum
from typing import Any

from simkv.core.figure_registry import STATISTICS
from simkv.core.grouped_quantile import quantile
from simkv.core.outcome import Outcome
from simkv.sim.run_record import RequestRecord

_SHARES = {"median": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}


def is_counted(life: RequestRecord) -> bool:
    """Return whether the request was sent to the engine and was neither rejected nor cancelled."""
    was_sent = life.received_at is not None or get_waiting_time(life) > 0.0
    return was_sent and life.outcome not in (Outcome.REJECTED, Outcome.CANCELLED)


def get_waiting_time(life: RequestRecord) -> float:
    """Return the seconds from the arrival of a request until it ended."""
    return max((life.ended_at or 0.0) - life.request.arrival, 0.0)


@dataclass(frozen=True)
class CensoredLatency:
    """Latencies of requests in seconds. For some requests, only a lower bound is known.

    ``known`` contains the measured latencies. ``censored`` contains the waiting times of the other
    requests, as lower bounds. Both lists are in ascending order.
    """

    known: Sequence[float]
    censored: Sequence[float]

    def at_least(self, statistic: str) -> float | None:
        """Return a lower bound of a statistic of the latencies in seconds, or None without
        requests.

        ``statistic`` is ``mean``, ``median``, ``p90``, ``p95`` or ``p99``. Percentiles are
        interpolated linearly between samples (``simkv.core.grouped_quantile``).
        """
        values = sorted([*self.known, *self.censored])
        if not values:
            return None
        if statistic == "mean":
            return fsum(values) / len(values)
        return quantile(values, range(1, len(values) + 1), _SHARES[statistic])

    def at_most(self, statistic: str) -> float | None:
        """Return an upper bound of a statistic of the latencies in seconds, or None for infinity.

        The latency of each censored request counts as infinite.
        """
        if not self.censored:
            return self.at_least(statistic)
        count = len(self.known) + len(self.censored)
        if statistic == "mean" or ceil(_SHARES[statistic] * (count - 1)) >= len(self.known):
            return None
        values = [*self.known, *(self.known[-1] for _ in self.censored)]
        return quantile(values, range(1, count + 1), _SHARES[statistic])

    def figures_ms(self) -> dict[str, Any]:
        """Return the entries of ``summary.json``, in milliseconds.

        ``censored`` is the number of censored requests. ``at_least`` lists the statistics that are
        only lower bounds.
        """
        found: dict[str, Any] = {}
        for name in STATISTICS:
            value = self.at_least(name)
            found[name] = None if value is None else 1000.0 * value
        bounds = [name for name in STATISTICS if self.at_most(name) != self.at_least(name)]
        return {**found, "censored": len(self.censored), "at_least": bounds}


def compute_censored_latency(
    lives: Iterable[RequestRecord], latency: Callable[[RequestRecord], float | None]
) -> CensoredLatency:
    """Collect a latency of all requests that were sent, and neither rejected nor cancelled.

    ``latency`` returns the latency of a request in seconds, or None if it is unknown.
    """
    known, censored = [], []
    for life in lives:
        if is_counted(life):
            seconds = latency(life)
            if seconds is None:
                censored.append(get_waiting_time(life))
            else:
                known.append(seconds)
    return CensoredLatency(sorted(known), sorted(censored))
