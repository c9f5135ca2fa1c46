"""Plot of the latency of each request, variant beside variant, including failed requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from simkv.core.outcome import Outcome
from simkv.metrics.run_metrics import e2e, ttft
from simkv.report.plot_style import (
    BLUE,
    GREY,
    SKY,
    WIDTH,
    columns_for,
    draw_panel_title,
    failure_legend,
    mark_failures,
    number_requests,
    sort_requests_by_arrival,
    title_and_legend,
)
from simkv.sim.run_record import RequestRecord, RunRecord


class LatencyPoint(NamedTuple):
    """Index of a request in order of arrival and its latencies, in seconds after its arrival.

    ``first`` is None if no token was emitted. ``last`` is the E2E latency, or for a failed request
    the time that it waited.
    """

    place: int
    first: float | None
    last: float
    outcome: Outcome | None


def latency_points(record: RunRecord) -> list[LatencyPoint]:
    """Return one point per request, in order of arrival; none is omitted."""
    return [
        LatencyPoint(place, ttft(life), _last(record, life), life.outcome)
        for place, life in enumerate(sort_requests_by_arrival(record))
    ]


def _last(record: RunRecord, life: RequestRecord) -> float:
    latency = e2e(life)
    if latency is not None:
        return latency
    end = record.end if life.ended_at is None else life.ended_at
    return max(end - life.request.arrival, 0.0)


def draw_latency(records: Mapping[str, RunRecord], title: str) -> Figure:
    """Draw TTFT and E2E latency of every request by arrival, one panel per variant."""
    columns = columns_for(len(records))
    rows = -(-len(records) // columns)
    figure = Figure(figsize=(WIDTH, 0.9 + rows * (3.4 if rows == 1 else 2.6)))
    grid = figure.subplots(rows, columns, sharey=True, squeeze=False)
    panels: list[Axes] = list(grid.flat)
    outcomes: set[Outcome | None] = set()
    for panel, (variant, record) in zip(panels, records.items(), strict=False):
        found = latency_points(record)
        outcomes |= {point.outcome for point in found}
        _draw(panel, found)
        number_requests(panel, "x", sort_requests_by_arrival(record))
        draw_panel_title(panel, variant, record, columns)
    for spare in panels[len(records) :]:
        spare.remove()
    for panel in panels[max(len(records) - columns, 0) : len(records)]:
        panel.set_xlabel("request")
    for row in grid:
        row[0].set_ylabel("seconds after arrival")
    grid[0][0].set_ylim(bottom=0.0)
    handles: list[Artist] = [
        Line2D(
            [], [], linestyle="", marker="o", mfc="white", color=BLUE, label="first token (TTFT)"
        ),
        Line2D([], [], linestyle="", marker="o", color=BLUE, label="last token (E2E)"),
    ]
    title_and_legend(figure, title, handles + failure_legend(outcomes))
    return figure


def _draw(axes: Axes, found: list[LatencyPoint]) -> None:
    size = 4.5 if len(found) <= 80 else 2.5
    done = [point for point in found if point.outcome is Outcome.FINISHED]
    axes.plot([p.place for p in done], [p.last for p in done], "o", color=BLUE, ms=size)
    started = [(p.place, p.first, p.last) for p in found if p.first is not None]
    if started:  # an empty unclipped curve breaks the layout
        places, firsts, lasts = zip(*started, strict=True)
        width = 1.0 if len(found) <= 80 else 0.4
        axes.vlines(places, firsts, lasts, color=SKY, linewidth=width, zorder=1)
        axes.plot(places, firsts, "o", mfc="white", color=BLUE, ms=size, clip_on=False, zorder=3)
    failed: dict[Outcome, list[tuple[float, float]]] = {}
    for point in found:
        if point.outcome is not None:
            failed.setdefault(point.outcome, []).append((point.place, point.last))
    mark_failures(axes, failed, size + 1.5)
    axes.set_axisbelow(True)
    axes.grid(axis="y", color=GREY, linewidth=0.6)
