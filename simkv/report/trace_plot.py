"""Plot of a trace: arrivals, lengths, KV in flight and shared prefixes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from simkv.report.plot_style import (
    BLUE,
    RED,
    SKY,
    SLATE,
    WIDTH,
    plot_settings,
    save,
)
from simkv.workload.trace_statistics import BinnedAmounts, LengthHistogram, TraceStatistics

#: Maximum number of points across a panel.
POINTS = 300


def draw_trace(survey: TraceStatistics, title: str, path: Path) -> Path:
    """Write the plot as a PNG. Equal traces give equal bytes."""
    with plot_settings():
        figure = Figure(figsize=(WIDTH, 6.4))
        panels = figure.subplots(2, 2)
        _arrivals(panels[0, 0], survey)
        _lengths(panels[0, 1], survey)
        _demand(panels[1, 0], survey)
        _sharing(panels[1, 1], survey)
        figure.suptitle(title, x=0.01, ha="left", fontweight="bold", fontsize=12)
        return save(figure, path)


def _arrivals(axes: Axes, survey: TraceStatistics) -> None:
    axes.set_title("Arrivals (requests/s)", loc="left")
    if not survey.span > 0:
        _nothing(axes, "this trace has no arrival times")
        return
    edges, totals = _bins(survey.arrivals, survey.last)
    axes.stairs(totals / np.diff(edges), edges, fill=True, color=SKY)
    mean = survey.requests / survey.span
    axes.axhline(mean, color=SLATE, linewidth=1, linestyle=(0, (4, 2)))
    axes.annotate(
        f"mean {mean:.3g}",
        (1, mean),
        xycoords=("axes fraction", "data"),
        ha="right",
        va="bottom",
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1},
    )
    axes.set_xlabel("time (s)")
    axes.set_ylim(0)


def _lengths(axes: Axes, survey: TraceStatistics) -> None:
    axes.set_title("Lengths: share of requests with at most N tokens", loc="left")
    for name, lengths, colour in (
        ("prompt", survey.prompts, BLUE),
        ("output", survey.outputs, RED),
    ):
        values, shares = _distribution(lengths)
        axes.plot(values, shares, drawstyle="steps-post", color=colour, label=name)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_ylim(0, 1)
    axes.set_xlabel("tokens")
    axes.legend(frameon=False, loc="upper left")


def _demand(axes: Axes, survey: TraceStatistics) -> None:
    axes.set_title(f"KV in flight (blocks of {survey.block_size} tokens)", loc="left")
    if not survey.span > 0:
        _nothing(axes, "this trace has no arrival times")
        return
    held = survey.demand.held
    count = int(survey.last / held.width) + 2
    level = np.cumsum(held.values)[:count]
    step = max(count // POINTS, 1)
    cut = level[: len(level) // step * step].reshape(-1, step).max(axis=1)
    axes.stairs(cut, held.width * step * np.arange(len(cut) + 1), fill=True, color=SKY)
    axes.set_ylim(0)
    axes.set_xlabel(f"time (s)\nif {survey.service}", fontsize=8)


def _sharing(axes: Axes, survey: TraceStatistics) -> None:
    axes.set_title("Prompt tokens in an unlimited prefix cache", loc="left")
    if not survey.sharing.known:
        _nothing(axes, "shared prefixes are not recorded in this trace")
        return
    requests, rates = zip(*survey.shared_course, strict=True)
    axes.plot(requests, np.array(rates) * 100, color=BLUE)
    axes.set_xlim(0)
    axes.set_ylim(0, 100)
    axes.set_ylabel("% so far")
    axes.set_xlabel("requests")


def _bins(course: BinnedAmounts, last: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the edges (s) and the sums of at most POINTS time bins up to ``last``."""
    count = int(last / course.width) + 1
    step = -(-count // POINTS)
    padded = np.pad(course.values, (0, step))[: -(-count // step) * step]
    totals = padded.reshape(-1, step).sum(axis=1)
    return course.width * step * np.arange(len(totals) + 1), totals


def _distribution(lengths: LengthHistogram) -> tuple[np.ndarray, np.ndarray]:
    values, counts = lengths.counts()
    return values, np.cumsum(counts) / counts.sum()


def _nothing(axes: Axes, why: str) -> None:
    axes.text(0.5, 0.5, why, ha="center", va="center", color=SLATE, transform=axes.transAxes)
    axes.set_xticks([])
    axes.set_yticks([])
