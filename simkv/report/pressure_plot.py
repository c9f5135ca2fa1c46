"""Plot of KV cache use and queues over time, from the step log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from simkv.explain.wait_ledger import find_pauses
from simkv.report.plot_style import (
    BLUE,
    DARK,
    SKY,
    SLATE,
    WIDTH,
    columns_for,
    draw_panel_title,
    find_end_time,
    mark_halt,
    title_and_legend,
)
from simkv.sim.run_record import RunRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Number of time bins across the plot.
BINS = 300

Floats = npt.NDArray[np.float64]


class BinnedColumn(NamedTuple):
    """Minimum, time-weighted mean and maximum of a column of the step log in each time bin.

    The values of bins without a step are NaN.
    """

    least: Floats
    mean: Floats
    most: Floats


def bin_column(record: RunRecord, column: Sequence[int], edges: Floats) -> BinnedColumn:
    """Return the statistics of ``column`` between ``edges`` (s, evenly spaced).

    The value of a step applies until the next step starts, or until the engine pauses.
    """
    nothing = np.full(len(edges) - 1, np.nan)
    if not len(column):
        return BinnedColumn(nothing, nothing, nothing)
    start, end = np.asarray(record.steps.start), np.asarray(record.steps.end)
    values = np.asarray(column, dtype=np.float64)
    until = np.append(start[1:], end[-1])
    paused = find_pauses(record)
    until[paused] = end[paused]
    lasts = until - start
    corners = np.column_stack([start, until]).ravel()
    covered = _between(edges, corners, lasts)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = _between(edges, corners, lasts * values) / covered
    first = np.searchsorted(until, edges[:-1], side="right")
    stop = np.maximum(np.searchsorted(start, edges[1:], side="left"), first + 1)
    ranges = np.column_stack([first, stop]).ravel()
    padded = np.append(values, [values[-1], values[-1]])  # for bins after the last row
    ranges = np.minimum(ranges, len(values) + 1)
    least = np.minimum.reduceat(padded, ranges)[::2]
    most = np.maximum.reduceat(padded, ranges)[::2]
    empty = covered <= 0.0
    return BinnedColumn(*(np.where(empty, np.nan, series) for series in (least, mean, most)))


def _between(edges: Floats, corners: Floats, amounts: Floats) -> Floats:
    """Return the sum of ``amounts`` in each bin. ``corners`` are the start and end of each
    amount.
    """
    sums = np.cumsum(np.column_stack([np.zeros(len(amounts)), amounts]).ravel())
    return np.diff(np.interp(edges, corners, sums))


def draw_pressure(records: Mapping[str, RunRecord], title: str) -> Figure:
    """Draw the fraction of KV blocks in use, and the running and waiting requests, for each
    variant.
    """
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    columns = columns_for(len(records))
    rows = -(-len(records) // columns)
    figure = Figure(figsize=(WIDTH, 0.9 + rows * 3.6))
    grid = figure.subplots(2 * rows, columns, sharex=True, squeeze=False)
    end = find_end_time(records.values()) or 1.0
    edges = np.linspace(0.0, end, BINS // columns + 1)
    most = max((_most(record) for record in records.values()), default=1)
    for index, (variant, record) in enumerate(records.items()):
        row, column = divmod(index, columns)
        blocks, queues = grid[2 * row][column], grid[2 * row + 1][column]
        _draw_blocks(blocks, record, edges)
        _draw_queues(queues, record, edges)
        blocks.set_xlim(0.0, end)
        blocks.set_ylim(0.0, 125.0)
        blocks.set_yticks([0, 50, 100])
        queues.set_ylim(0.0, most * 1.08)
        mark_halt(blocks, record)
        mark_halt(queues, record, label=False)
        draw_panel_title(blocks, variant, record, columns)
        if column == 0:
            blocks.set_ylabel("KV blocks held (%)")
            queues.set_ylabel("requests")
        if index >= len(records) - columns:
            queues.set_xlabel("time (s)")
            queues.tick_params(labelbottom=True)
    for spare in range(len(records), rows * columns):
        row, column = divmod(spare, columns)
        grid[2 * row][column].remove()
        grid[2 * row + 1][column].remove()
    title_and_legend(
        figure,
        title,
        [
            Patch(facecolor=SKY, label="blocks held (mean, range)"),
            Line2D([], [], color=BLUE, label="running (mean, range)"),
            Line2D([], [], color=SLATE, label="waiting (mean, range)"),
        ],
    )
    return figure


def _most(record: RunRecord) -> int:
    return max([1, *record.steps.waiting, *record.steps.running])


def _draw_blocks(axes: Axes, record: RunRecord, edges: Floats) -> None:
    blocks = max(record.num_blocks, 1)
    free = bin_column(record, record.steps.free_blocks, edges)
    least, mean, most = (100.0 * (1.0 - series / blocks) for series in reversed(free))
    _band(axes, edges, np.zeros_like(mean), mean, SKY, 1.0)
    _band(axes, edges, least, most, SKY, 0.45)
    axes.axhline(100.0, color=DARK, linestyle="--", linewidth=1.0)
    axes.annotate(
        f"100 % = {record.num_blocks} blocks",
        (1.0, 100.0),
        xycoords=("axes fraction", "data"),
        xytext=(-2, 3),
        textcoords="offset points",
        ha="right",
        va="bottom",
        fontsize=9,
    )


def _draw_queues(axes: Axes, record: RunRecord, edges: Floats) -> None:
    for column, colour in ((record.steps.waiting, SLATE), (record.steps.running, BLUE)):
        least, mean, most = bin_column(record, column, edges)
        _band(axes, edges, least, most, colour, 0.25)
        axes.stairs(mean, edges, baseline=None, color=colour, linewidth=1.4)


def _band(
    axes: Axes, edges: Floats, low: Floats, high: Floats, colour: str, opacity: float
) -> None:
    axes.stairs(high, edges, baseline=low, fill=True, color=colour, alpha=opacity, linewidth=0)
