"""Plots of a validation: predicted and measured step times, and simulated and real metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullFormatter

from simkv.core.figure_registry import METRICS
from simkv.costs.cost_profile import CostProfile, StepCost
from simkv.costs.scaled_executor import StepKind, classify_step
from simkv.report.plot_style import (
    BLUE,
    DARK,
    GREY,
    RED,
    SLATE,
    WIDTH,
    YELLOW,
    title_and_legend,
)
from simkv.validation.gpu_runs.run_ranking import JudgedTrial

COLOURS: dict[StepKind, str] = {"decode": BLUE, "prefill": YELLOW, "mixed": RED}
#: Metrics of the second plot.
PLOTTED_FIGURES = (
    "makespan_s",
    "output_throughput",
    *(f"{name}.{s}" for name in ("ttft_ms", "tpot_ms", "e2e_ms") for s in ("mean", "p99")),
)


def draw_steps(judged: Sequence[JudgedTrial], profiles: Mapping[str, CostProfile]) -> Figure:
    """Plot measured against predicted times of all steps, for each trial and kind of step."""
    columns = min(len(judged), 3)
    rows = -(-len(judged) // columns)
    figure = Figure(figsize=(WIDTH, 0.8 + 2.8 * rows))
    grid = figure.subplots(rows, columns, squeeze=False)
    costs = {name: StepCost(profile) for name, profile in profiles.items()}
    for axes, one in zip(grid.flat, judged, strict=False):
        cost = costs[one.trial.profile]
        for kind, colour in COLOURS.items():
            points = [
                (s * 1e3, cost(x) * 1e3) for x, s in one.run.steps if classify_step(x) == kind
            ]
            if points:
                xs, ys = zip(*points, strict=True)
                axes.plot(xs, ys, ".", ms=3, color=colour, mec=DARK, mew=0.1, rasterized=True)
        both = [v for x, s in one.run.steps for v in (s * 1e3, cost(x) * 1e3)]
        ends = (min(both) * 0.9, max(both) * 1.1)
        axes.plot(ends, ends, color=SLATE, linewidth=0.8)
        axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(LogLocator(subs=(1.0, 3.0)))
            axis.set_major_formatter(lambda value, _: f"{value:g}")
            axis.set_minor_formatter(NullFormatter())
        axes.set_title(one.trial.name, loc="left", fontsize=9)
        axes.set_xlabel("measured (ms)")
        axes.set_ylabel("predicted (ms)")
    for axes in list(grid.flat)[len(judged) :]:
        axes.set_visible(False)
    handles = [
        Line2D([], [], linestyle="", marker="o", color=colour, mec=DARK, mew=0.3, label=kind)
        for kind, colour in COLOURS.items()
    ]
    title_and_legend(figure, "Step times: predicted against measured", handles)
    return figure


def draw_figures(judged: Sequence[JudgedTrial]) -> Figure:
    """Plot the relative error of each metric in each trial, and the difference between repeated
    runs.
    """
    figure = Figure(figsize=(WIDTH, 1.6 + 1.4 * len(judged)))
    grid = figure.subplots(len(judged), 1, squeeze=False, sharex=True)[:, 0]
    places = range(len(PLOTTED_FIGURES))
    for axes, one in zip(grid, judged, strict=True):
        found = [one.figure(name) for name in PLOTTED_FIGURES]
        noise = [100 * (f.noise or 0.0) for f in found]
        errors = [100 * (f.error() or 0.0) for f in found]
        axes.bar(places, [2 * n for n in noise], bottom=[-n for n in noise], color=GREY, width=0.8)
        axes.bar(places, errors, color=BLUE, width=0.35)
        axes.axhline(0.0, color=SLATE, linewidth=0.8)
        axes.set_title(one.trial.name, loc="left", fontsize=9)
        axes.set_ylabel("error (%)")
        axes.set_xticks(
            list(places), [METRICS[name].label for name in PLOTTED_FIGURES], rotation=20, ha="right"
        )
    handles = [
        Line2D([], [], linestyle="", marker="s", color=BLUE, label="simulated against real"),
        Line2D([], [], linestyle="", marker="s", color=GREY, label="real against real"),
    ]
    title_and_legend(figure, "A free simulation against the run", handles)
    return figure
