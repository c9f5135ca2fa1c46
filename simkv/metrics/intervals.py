"""Intervals of a run's metrics, from re-runs with step times at the error bounds of the cost
profile.

Re-runs are used only if their values are comparable with the run. Latencies of finished requests
are comparable if the same requests finish. A latency of all requests has no upper bound if some
requests are never answered. A missing bound is None, with a reason.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from simkv.core.figure_registry import (
    LATENCIES,
    OVER_ALL,
    STATISTICS,
    figure,
)
from simkv.core.outcome import Outcome
from simkv.metrics.censored_latency import compute_censored_latency, is_counted
from simkv.metrics.run_metrics import e2e, summarize, ttft
from simkv.metrics.steady_state import check_steady_state
from simkv.sim.run_record import RunRecord

#: Metrics with an interval, named as in ``summary.json``.
INTERVAL_FIGURES = (
    "makespan_s",
    "request_throughput",
    "output_throughput",
    "total_token_throughput",
    "preemptions",
    "recomputed_tokens",
    *Outcome,
    "longest_stall_s",
    *(f"{name}.{s}" for name in (*LATENCIES, *OVER_ALL.values()) for s in STATISTICS),
)
_RATES = ("request_throughput", "output_throughput", "total_token_throughput")
#: Outcomes of requests that would never be answered, however long their clients waited.
_HALTED = (Outcome.STALLED, Outcome.LOST)
#: Outcomes of requests that still waited for an answer at the end of the run.
_OPEN = (*_HALTED, Outcome.CUT_OFF)

#: Reason for a missing upper bound, by the name of the latency of all requests.
_MISSING = {OVER_ALL["ttft_ms"]: "no first token", OVER_ALL["e2e_ms"]: "no complete answer"}


class FigureInterval(NamedTuple):
    """Interval of a metric, in the metric's unit. None means that there is no bound."""

    low: float | None
    high: float | None

    @property
    def is_certain(self) -> bool:
        """Whether the lower and the upper bound are equal."""
        return self.low is not None and self.low == self.high

    def contains(self, value: float) -> bool:
        """Return whether ``value`` is in the interval."""
        return (self.low is None or self.low <= value) and (self.high is None or value <= self.high)

    def text(self, show: Callable[[float], str], reason: str = "") -> str:
        """Return the interval as text, with values formatted by ``show``.

        Examples are ``from 2 to 3 (reason)``, ``at least 2 (reason)`` and ``not determined
        (reason)``.
        """
        why = f" ({reason})" if reason else ""
        if self.low is not None and self.high is not None:
            return f"from {show(self.low)} to {show(self.high)}{why}"
        if self.low is not None:
            return f"at least {show(self.low)}{why}"
        return f"not determined{why}"


NOT_DETERMINED = FigureInterval(None, None)


class Members(NamedTuple):
    """Size and hash of a set of request ids, for comparisons."""

    size: int
    digest: int

    @classmethod
    def of(cls, ids: Collection[int]) -> Members:
        """Compute the size and hash of a set of request ids."""
        return cls(len(ids), hash(frozenset(ids)))


@dataclass(frozen=True)
class MeasuredRun:
    """Metrics of a run or re-run that are needed for intervals.

    ``name`` describes the run in reasons for missing bounds. ``finished`` is the set of finished
    requests. ``counted`` is the set of requests in statistics over all requests, and ``at_most``
    contains the upper bounds of these statistics in ms (None if infinite). ``left_open`` is the
    number of requests without an answer at the end. ``halted`` is the number of stalled or lost
    requests. ``saturated`` is true if the number of requests in flight kept growing.
    """

    name: str
    figures: Mapping[str, Any]
    finished: Members
    counted: Members
    at_most: Mapping[str, float | None]
    left_open: int
    halted: int
    saturated: bool = False

    @classmethod
    def of(
        cls, name: str, record: RunRecord, figures: Mapping[str, Any] | None = None
    ) -> MeasuredRun:
        """Build from the record of a run, and its metrics ``figures`` if already computed."""
        lives = record.requests
        measures = {"ttft_ms": ttft, "e2e_ms": e2e}
        at_most: dict[str, float | None] = {}
        for group, key in OVER_ALL.items():
            latency = compute_censored_latency(lives.values(), measures[group])
            for statistic in STATISTICS:
                found = latency.at_most(statistic)
                at_most[f"{key}.{statistic}"] = None if found is None else 1000.0 * found
        return cls(
            name,
            summarize(record) if figures is None else figures,
            Members.of([i for i, life in lives.items() if life.outcome is Outcome.FINISHED]),
            Members.of([i for i, life in lives.items() if is_counted(life)]),
            at_most,
            sum(life.outcome in _OPEN for life in lives.values()),
            sum(life.outcome in _HALTED for life in lives.values()),
            check_steady_state(record).grows,
        )

    def value(self, name: str) -> float | None:
        """Return the metric ``name``, or None if the run has no sample of it."""
        found = figure(self.figures, name)
        return None if found is None else float(found)


def compute_interval(name: str, runs: Sequence[MeasuredRun]) -> tuple[FigureInterval, str]:
    """Return the interval of the metric ``name`` over ``runs``, and the reason for a missing bound.

    The reason is empty if no bound is missing.
    """
    group = name.partition(".")[0]
    lows = [run.value(name) for run in runs]
    highs = lows
    why = ""
    if group in OVER_ALL.values():
        if len({run.counted for run in runs}) > 1:
            return NOT_DETERMINED, _reason("latencies of", runs, lambda run: run.counted.size)
        highs = [run.at_most.get(name) for run in runs]
        why = _reason(_MISSING[group], runs, lambda run: int(run.figures[group]["censored"]))
    elif group in LATENCIES or name == "longest_stall_s":
        if len({run.finished for run in runs}) > 1:
            return NOT_DETERMINED, _reason("finished", runs, lambda run: run.finished.size)
    elif name in _RATES and any(run.halted for run in runs):
        return NOT_DETERMINED, _reason("stalled or lost", runs, lambda run: run.halted)
    elif name == "makespan_s":
        highs = [None if run.left_open else low for run, low in zip(runs, lows, strict=True)]
        why = _reason("left open", runs, lambda run: run.left_open)
    if None in lows:
        return NOT_DETERMINED, "no request has this latency"
    low = min(value for value in lows if value is not None)
    if None in highs:
        return FigureInterval(low, None), why
    return FigureInterval(low, max(value for value in highs if value is not None)), ""


def find_saturation(name: str, runs: Sequence[MeasuredRun]) -> str:
    """Return a warning if a queue grows in one of the runs and ``name`` is a latency, or "".

    The upper bound of the latency then depends on the length of the run.
    """
    group = name.partition(".")[0]
    if group not in (*LATENCIES, *OVER_ALL.values()):
        return ""
    grown = [run.name for run in runs if run.saturated]
    return f"saturates {grown[0]}" if grown else ""


def _reason(what: str, runs: Sequence[MeasuredRun], count: Callable[[MeasuredRun], int]) -> str:
    """Return a reason for a missing bound that lists the ``count`` of each run.

    An example is ``finished: 300 requests with faster steps, 237 in the run, 60 with slower
    steps``.
    """
    first, *others = (f"{count(run):,} {run.name}" for run in runs)
    number, _, name = first.partition(" ")
    return f"{what}: {', '.join([f'{number} requests {name}', *others])}"
