"""Plots of a run: selection of plots, latency curves, and requests per replica of a fleet."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from simkv.core.outcome import SERVED, Outcome
from simkv.metrics.run_metrics import e2e, ttft
from simkv.metrics.run_result import RunResult
from simkv.report.lanes_plot import MAX_LANES, draw_lanes
from simkv.report.plot_style import (
    BLUE,
    GREY,
    SKY,
    WIDTH,
    columns_for,
    draw_panel_title,
    failure_legend,
    find_end_time,
    mark_failures,
    number_requests,
    plot_settings,
    save,
    sort_requests_by_arrival,
    title_and_legend,
)
from simkv.report.pressure_plot import Floats, bin_column, draw_pressure
from simkv.sim.run_record import RequestRecord, RunRecord

#: Number of time bins across the plot.
BINS = 240
#: Maximum number of replica names on an axis; more names would overlap.
_MOST_NAMES = 16

#: Records of a fleet's replicas by name.
ReplicaRecords = Mapping[str, RunRecord]


def draw_fleet(fleets: Mapping[str, ReplicaRecords], title: str) -> Figure:
    """Draw the requests of each replica over time, one panel per variant.

    All panels have the same color scale for the number of running and waiting requests.
    """
    rows = [max(len(parts), 3) for parts in fleets.values()]
    height = sum(0.75 + 0.16 * min(count, 24) for count in rows)
    figure = Figure(figsize=(WIDTH, 0.9 + height))
    panels = list(
        figure.subplots(len(fleets), 1, squeeze=False, sharex=True, height_ratios=rows)[:, 0]
    )
    end = find_end_time(record for parts in fleets.values() for record in parts.values()) or 1.0
    edges = np.linspace(0.0, end, BINS + 1)
    loads = [
        np.vstack([_requests_per_bin(record, edges) for record in parts.values()])
        for parts in fleets.values()
    ]
    most = max([1.0, *(float(np.nanmax(load)) for load in loads if not np.isnan(load).all())])
    for panel, (variant, parts), load in zip(panels, fleets.items(), loads, strict=True):
        image = panel.imshow(
            load,
            extent=(0.0, end, len(load) - 0.5, -0.5),
            aspect="auto",
            interpolation="nearest",
            cmap="cividis_r",
            vmin=0.0,
            vmax=most,
        )
        _name_rows(panel, list(parts))
        panel.set_title(variant, loc="left")
    panels[-1].set_xlabel("time (s)")
    figure.colorbar(image, ax=panels, label="requests running and waiting", pad=0.01)
    title_and_legend(figure, f"{title}: requests per replica (white: none)", [])
    return figure


def _requests_per_bin(record: RunRecord, edges: Floats) -> Floats:
    """Return the mean number of running and waiting requests in each bin, or NaN without a step."""
    steps = record.steps
    return (
        bin_column(record, steps.running, edges).mean
        + bin_column(record, steps.waiting, edges).mean
    )


def _name_rows(axes: Axes, names: list[str]) -> None:
    if len(names) <= _MOST_NAMES:
        axes.set_yticks(range(len(names)), names)
    else:
        axes.set_ylabel("replica")
        axes.yaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))


def find_slowest_replica(parts: ReplicaRecords) -> str:
    """Return the replica with the most unserved requests.

    Ties go to the replica with the longest mean request time.
    """

    def ill(name: str) -> tuple[int, float]:
        lives = parts[name].requests.values()
        lasted = [(life.ended_at or 0.0) - life.request.arrival for life in lives]
        unserved = sum(life.outcome not in SERVED for life in lives)
        return unserved, sum(lasted) / max(len(lasted), 1)

    return max(parts, key=ill)


class LatencyPoint(NamedTuple):
    """Latencies of a request in seconds. ``place`` is its index in order of arrival.

    ``first`` is the TTFT, or None. ``last`` is the E2E latency, or the waiting time of a failed
    request.
    """

    place: int
    first: float | None
    last: float
    outcome: Outcome | None


def latency_points(record: RunRecord) -> list[LatencyPoint]:
    """Return the latencies of all requests, in order of arrival."""
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
    if started:  # an empty curve without clipping breaks the layout
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


#: Time limit in seconds for rendering plots that were not requested.
TIME_BUDGET_S = 1.0

Records = Mapping[str, RunRecord]

_DRAW: dict[str, Callable[[Records, str], Figure]] = {
    "lanes": draw_lanes,
    "latency": draw_latency,
    "pressure": draw_pressure,
}


def write_plots(
    records: Records, title: str, folder: Path, names: Collection[str] = tuple(_DRAW)
) -> list[Path]:
    """Write ``lanes.png``, ``latency.png`` and ``pressure.png`` to ``folder``, and return their
    paths.

    ``names`` selects some of the plots. ``records`` are the variants of one scenario by name. Equal
    records give equal bytes.
    """
    with plot_settings():
        return [
            save(draw(records, title), folder / f"{name}.png")
            for name, draw in _DRAW.items()
            if name in names
        ]


def write_run_plots(
    results: Mapping[str, RunResult], title: str, folder: Path, *, everything: bool
) -> list[str]:
    """Write the plots of a run and return the file names of omitted plots.

    By default, only plots that render within ``TIME_BUDGET_S`` in total are written. For a fleet,
    ``fleet.png`` is added, and the other plots show the slowest replica.
    """
    fleets = {name: result.parts for name, result in results.items() if result.fleet}
    records = {}
    for name, result in results.items():
        if len(result.parts) > 1:
            worst = find_slowest_replica(result.parts)
            title_of = f"{name}: {worst}, the slowest of {len(result.parts)}"
            records[title_of] = result.parts[worst]
        else:
            records[name] = result.record
    wanted = list(_DRAW) if everything else _affordable(records, TIME_BUDGET_S - bool(fleets) * 0.4)
    write_plots(records, title, folder, wanted)
    if fleets:
        with plot_settings():
            save(draw_fleet(fleets, title), folder / "fleet.png")
    return [f"{name}.png" for name in _DRAW if name not in wanted]


def _affordable(records: Records, budget: float) -> list[str]:
    """Return the names of the first plots that render within ``budget`` seconds in total.

    Render times are estimated from the run, so that the same run always has the same plots.
    """
    panels = len(records)
    lives = [life for record in records.values() for life in record.requests.values()]
    lanes = sum(min(len(record.requests), MAX_LANES) for record in records.values())
    stretches = sum(len(life.segments) for life in lives) * lanes / max(len(lives), 1)
    cost = {
        "lanes": 0.20 + 0.06 * panels + 1.2e-3 * lanes + 5e-5 * stretches,
        "latency": 0.15 + 0.035 * panels + 2e-4 * len(lives),
        "pressure": 0.20 + 0.11 * panels + 4e-6 * sum(len(r.steps) for r in records.values()),
    }
    chosen = []
    for name, seconds in cost.items():
        if seconds <= budget:
            chosen.append(name)
            budget -= seconds
    return chosen
