"""Plot of a fleet: the number of requests of each replica over time, one row per replica."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from simkv.report.plot_style import WIDTH, find_end_time, title_and_legend
from simkv.report.pressure_plot import Floats, bin_column
from simkv.sim.run_record import RunRecord

#: Number of time bins across the plot.
BINS = 240
#: Maximum number of replica names; more would overlap.
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
        np.vstack([_load(record, edges) for record in parts.values()]) for parts in fleets.values()
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


def _load(record: RunRecord, edges: Floats) -> Floats:
    """Return the mean of running and waiting requests per bin; NaN if nothing was computed."""
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
    """Return the replica with the most unserved requests, then the longest mean request time."""

    def ill(name: str) -> tuple[int, float]:
        lives = parts[name].requests.values()
        lasted = [(life.ended_at or 0.0) - life.request.arrival for life in lives]
        unserved = sum(life.outcome != "finished" for life in lives)
        return unserved, sum(lasted) / max(len(lasted), 1)

    return max(parts, key=ill)
