"""Coverage of intervals: the fraction of measured metrics inside the predicted intervals."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from simkv.costs.profile_uncertainty import MAX_UNKNOWN_SHARE
from simkv.validation.figure_comparison import FigureComparison
from simkv.validation.recorded_runs.run_scores import Score

#: Metrics below this (ms or s) are not counted, because their error in percent is meaningless.
MIN_FIGURE = 1.0
#: Nominal coverage of the intervals in percent.
STATED_COVERAGE = 90


@dataclass(frozen=True)
class Coverage:
    """Number of measured metrics, and number of metrics inside the predicted interval.

    ``figures`` is the number of metrics with an interval. ``held`` is the number of metrics inside
    their interval. ``half`` is half the width of an interval relative to the prediction (median),
    or None. ``refused`` is the number of metrics without an interval.
    """

    figures: int
    held: int
    half: float | None
    refused: int


def is_in_range(s: Score) -> bool:
    """Return whether a run is in the profile's range for almost all of its time.

    At most the fraction ``MAX_UNKNOWN_SHARE`` of its time may be outside the range.
    """
    return s.replayed.outside <= MAX_UNKNOWN_SHARE


def coverage(scores: Sequence[Score]) -> Coverage:
    """Return the interval coverage over the metrics of the given runs.

    Values up to ``MIN_FIGURE`` are ignored.
    """
    figures = [f for s in scores for f in s.figures if f.real > MIN_FIGURE]
    given = [f for f in figures if f.interval]
    return Coverage(
        len(given),
        sum(bool(f.held) for f in given),
        median(map(_half, given)) if given else None,
        len(figures) - len(given),
    )


def _half(f: FigureComparison) -> float:
    assert f.interval is not None
    return (f.interval[1] - f.interval[0]) / 2 / max(f.predicted, 1e-9)


def coverage_rows(scores: Sequence[Score]) -> Iterator[list[str]]:
    """Yield table rows for all runs within the profile's range, for all runs outside it, and per
    run.
    """
    parts = {
        "in range": [s for s in scores if is_in_range(s)],
        "out of range": [s for s in scores if not is_in_range(s)],
        **{s.case.name: [s] for s in scores},
    }
    for name, some in parts.items():
        found = coverage(some)
        share = f"{100 * found.held / found.figures:.0f} %" if found.figures else ""
        half = "" if found.half is None else f"{100 * found.half:.1f} %"
        yield [name, f"{found.held} of {found.figures}", share, half, str(found.refused)]


def refused_runs(scores: Sequence[Score]) -> list[str]:
    """Return the name of each run without intervals, and the reason."""
    return [
        f"{s.case.name}: {100 * s.replayed.unknown:.0f} % of the busy time outside the known range"
        if s.replayed.unknown > MAX_UNKNOWN_SHARE
        else f"{s.case.name}: the error of its cost profile is unknown"
        for s in scores
        if not any(f.interval for f in s.figures)
    ]


HEAD = ("cases", "in their interval", "", "half-width (median)", "refused")
