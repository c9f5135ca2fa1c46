"""Plots of a sweep: a metric against a setting, and two metrics against each other."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from simkv.core.errors import InputError, spelling_hint
from simkv.core.figure_registry import FIGURE_NAMES, OPTIONAL_METRICS, heading
from simkv.report.plot_style import (
    BLUE,
    DARK,
    GREY,
    PURPLE,
    RED,
    WIDTH,
    plot_settings,
    save,
    set_log_scale,
    title_and_legend,
)
from simkv.study.sweep_axes import format_assignment

#: Distinct line colors; further lines use the same colors with other line styles.
COLOURS = (BLUE, RED, "#009E73", PURPLE, DARK)
STROKES = ("-", "--", ":")
MARKERS = "osD^vPX"
#: Maximum number of distinct lines; if there are more, the most important setting determines the
#: color.
MAX_LINES = len(COLOURS) * len(STROKES)
#: Minimum ratio of the largest to the smallest value for a logarithmic axis.
MIN_LOG_RATIO = 30.0
#: Number of characters that fit next to each other under an axis.
_MOST_LETTERS = 80
#: Distance below which points share a label, as a fraction of the plot.
_CLOSE = 0.025


@dataclass(frozen=True)
class Plot:
    """Plot of a metric of summary.json against a setting.

    ``knob`` is the path of the setting, or ``variant``.
    """

    figure: str
    knob: str

    @property
    def file(self) -> str:
        return _file(f"{self.figure}-by-{self.knob}")


@dataclass(frozen=True)
class ParetoGoal:
    """A metric to optimize. ``more`` is true if higher values are better."""

    figure: str
    more: bool

    def __str__(self) -> str:
        return f"{self.figure}:{'max' if self.more else 'min'}"


@dataclass(frozen=True)
class Pareto:
    """Pareto front over ``goals``. The plot shows the first two goals."""

    goals: tuple[ParetoGoal, ...]

    @property
    def file(self) -> str:
        return _file("pareto-" + "-".join(goal.figure for goal in self.goals))


def _file(name: str) -> str:
    return re.sub(r"[^\w.-]", "_", name) + ".png"


def parse_plot(text: str, knobs: Sequence[str]) -> Plot:
    """Parse ``METRIC:SETTING``. Raises InputError for an unknown metric or setting."""
    figure, colon, knob = text.partition(":")
    _known(figure, f"--plot {text}")
    known = [*knobs, "variant"]
    if not colon or knob not in known:
        raise InputError(
            f"--plot {text}: {knob!r} is not a setting of this "
            f"sweep{spelling_hint(knob, known)}; expected METRIC:SETTING with SETTING one of "
            f"{', '.join(known)}"
        )
    return Plot(figure, knob)


def parse_pareto(text: str) -> Pareto:
    """Parse two or more of ``METRIC:max,METRIC:min``. Raises InputError for any other text."""
    goals = []
    for part in text.split(","):
        figure, _, better = part.strip().partition(":")
        if better not in ("min", "max"):
            raise InputError(
                f"--pareto {text}: expected METRIC:max or METRIC:min; found {part.strip()!r}"
            )
        _known(figure, f"--pareto {text}")
        goals.append(ParetoGoal(figure, better == "max"))
    if len({goal.figure for goal in goals}) < max(len(goals), 2):
        raise InputError(f"--pareto {text}: expected two or more different metrics")
    return Pareto(tuple(goals))


def _known(figure: str, where: str) -> None:
    known = (*FIGURE_NAMES, *OPTIONAL_METRICS)
    if figure not in known:
        raise InputError(
            f"{where}: {figure!r} is not a metric of summary.json{spelling_hint(figure, known)}; "
            f"expected one of {', '.join(known)}"
        )


def check_figures(frame: pd.DataFrame, figures: Iterable[str], where: str) -> None:
    """Raise InputError if a table of runs lacks one of the metrics."""
    for figure in figures:
        if figure not in frame:
            of = OPTIONAL_METRICS.get(figure)
            what = f"only {of} have it" if of else "not in this table"
            raise InputError(f"{where}: {figure}: {what}")


def average_repeats(
    frame: pd.DataFrame, knobs: Sequence[str], figures: Sequence[str]
) -> pd.DataFrame:
    """Return one row per sweep point and variant: the mean over the repeats.

    The column ``±NAME`` is half of the 95 % confidence interval of the mean of metric NAME
    (Student's t; NaN for one repeat). ``unserved`` is true if a request in any repeat neither
    finished nor was cancelled. A metric is NaN if it is missing in a repeat.
    """
    rows = []
    for (point, variant), group in frame.groupby(["point", "variant"], sort=False):
        row: dict[str, Any] = {"point": point, "variant": variant}
        row |= {knob: group[knob].iloc[0] for knob in knobs}
        for name in figures:
            values = group[name].to_numpy(dtype=np.float64)
            row[name] = math.fsum(values) / len(values)
            row[f"±{name}"] = _half_interval(values)
        served = group["finished"] + group.get("cancelled", 0)
        row["unserved"] = bool((served < group["requests"]).any())
        rows.append(row)
    return pd.DataFrame(rows)


def _half_interval(values: npt.NDArray[np.float64]) -> float:
    if len(values) < 2:
        return math.nan
    from scipy.stats import t

    return float(t.ppf(0.975, len(values) - 1) * values.std(ddof=1) / math.sqrt(len(values)))


def pareto_front(points: pd.DataFrame, goals: Sequence[ParetoGoal]) -> pd.Series[bool]:
    """Return whether each row is Pareto-optimal.

    A row is not Pareto-optimal if another row is at least as good in all goals and better in one,
    or if a metric is missing.
    """
    costs = np.column_stack(
        [points[goal.figure].to_numpy(np.float64) * (-1 if goal.more else 1) for goal in goals]
    )
    on_front = [
        not np.isnan(row).any() and not ((costs <= row).all(1) & (costs < row).any(1)).any()
        for row in costs
    ]
    return pd.Series(on_front, index=points.index, dtype=bool)


def write_plot(frame: pd.DataFrame, knobs: Sequence[str], plot: Plot, folder: Path) -> Path:
    """Plot a metric against a setting and write the plot to ``folder``.

    There is one line for each combination of the other settings.
    """
    points = average_repeats(frame, knobs, [plot.figure])
    others = [name for name in (*knobs, "variant") if name != plot.knob]
    others = [name for name in others if len({repr(value) for value in points[name]}) > 1]
    lines = [group for _, group in points.groupby(others, sort=False)] if others else [points]
    sampled = len(lines) > 1 and max(map(len, lines)) == 1
    if sampled:  # each combination has one point, so there are no lines
        others = ["variant"] if "variant" in others else []
        lines = [group for _, group in points.groupby("variant", sort=False)]
    repeats = int(frame["repeat"].max()) + 1
    with plot_settings():
        figure = Figure(figsize=(WIDTH, 5.6))
        axes = figure.add_subplot()
        handles: list[Any] = []
        places = _places(axes, list(points[plot.knob]))
        few = len(lines) <= MAX_LINES
        told = others if few else [_matters_most(points, others, plot.figure)]
        looks: dict[str, dict[str, Any]] = {}
        labels = [", ".join(_setting(name, line[name].iloc[0]) for name in told) for line in lines]
        for label in dict.fromkeys(labels):
            looks[label] = _look(len(looks), len(set(labels)))
        for label, line in zip(labels, lines, strict=True):
            look = looks[label]
            _draw_line(axes, line, plot, places, look if not sampled else {**look, "linestyle": ""})
        if others:
            handles += [Line2D([], [], **look, label=label) for label, look in _ends(looks)]
        if points["unserved"].any():
            handles.append(_hollow())
        axes.set_xlabel(plot.knob)
        axes.set_ylabel(heading(plot.figure))
        axes.grid(color=GREY, linewidth=0.5)
        _logarithmic(axes, "y", points[plot.figure])
        many = f", {len(lines)} settings of {', '.join(others)}" if len(lines) > MAX_LINES else ""
        seeds = f", mean of {repeats} seeds, 95 % confidence" if repeats > 1 else ""
        title_and_legend(figure, f"{plot.figure} by {plot.knob}{many}{seeds}", handles)
        return save(figure, folder / plot.file)


def _matters_most(points: pd.DataFrame, knobs: Sequence[str], figure: str) -> str:
    """Return the setting with the largest effect on the mean of the metric."""

    def apart(knob: str) -> float:
        found = points.groupby(points[knob].map(repr))[figure].mean()
        return float(found.max() - found.min())

    return max(knobs, key=apart)


def _look(number: int, of: int) -> dict[str, Any]:
    """Return the style of line ``number`` of ``of`` lines. Many lines have a color scale."""
    stroke, hue = divmod(number, len(COLOURS))
    if of > MAX_LINES:
        colour = to_hex(colormaps["viridis"](0.9 * number / (of - 1)))
        return {"color": colour, "marker": "o", "linestyle": "-"}
    marker = MARKERS[number % len(MARKERS)]
    return {"color": COLOURS[hue], "marker": marker, "linestyle": STROKES[stroke]}


def _ends(looks: Mapping[str, dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    """Return the entries of the legend: one per line, or seven for a color scale."""
    rows = list(looks.items())
    if len(rows) <= MAX_LINES:
        return rows
    return [rows[round(part / 6 * (len(rows) - 1))] for part in range(7)]


def _setting(knob: str, value: Any) -> str:
    plain = value.item() if isinstance(value, np.generic) else value
    return str(plain) if knob == "variant" else format_assignment(knob, plain)


def _hollow() -> Line2D:
    return Line2D(
        [], [], linestyle="", marker="o", mfc="white", mec=DARK, label="some requests unserved"
    )


def _places(axes: Axes, values: Sequence[Any]) -> dict[str, float]:
    """Return the x position of each value. Numbers are their own positions; others are evenly
    spaced.
    """
    different = {repr(value): value for value in values}
    numbers = [v for v in different.values() if isinstance(v, int | float | np.number)]
    finite = not any(isinstance(v, bool | np.bool_) or not math.isfinite(v) for v in numbers)
    if len(numbers) == len(different) and finite:
        _logarithmic(axes, "x", numbers)
        return {name: float(value) for name, value in different.items()}
    labels = [str(value) for value in different.values()]
    slanted: dict[str, Any] = {"rotation": 25, "ha": "right", "rotation_mode": "anchor"}
    long = sum(map(len, labels)) > _MOST_LETTERS
    axes.set_xticks(range(len(labels)), labels, **(slanted if long else {}))
    return {name: float(place) for place, name in enumerate(different)}


def _logarithmic(axes: Axes, which: str, values: Any) -> None:
    """Make an axis logarithmic if its values are positive and span a large ratio."""
    known = [float(value) for value in values if not math.isnan(value)]
    if known and min(known) > 0 and max(known) / min(known) >= MIN_LOG_RATIO:
        set_log_scale(axes, which)


def _draw_line(
    axes: Axes,
    line: pd.DataFrame,
    plot: Plot,
    places: dict[str, float],
    look: Mapping[str, Any],
) -> None:
    x = np.array([places[repr(value)] for value in line[plot.knob]])
    order = np.argsort(x, kind="stable")
    x, y = x[order], line[plot.figure].to_numpy()[order]
    error = line[f"±{plot.figure}"].to_numpy()[order]
    hollow = line["unserved"].to_numpy()[order]
    bars = None if np.isnan(error).all() else error
    colour, marker, style = look["color"], look["marker"], look["linestyle"]
    axes.errorbar(
        x, y, bars, color=colour, linestyle=style, linewidth=1.4, elinewidth=0.9, capsize=3
    )
    for which, fill in ((~hollow, colour), (hollow, "white")):
        axes.plot(x[which], y[which], marker, color=colour, mfc=fill, ms=5.5, zorder=4)


def find_front(
    frame: pd.DataFrame, knobs: Sequence[str], pareto: Pareto
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return the points averaged over repeats, and the sorted points of the Pareto front."""
    names = [goal.figure for goal in pareto.goals]
    points = average_repeats(frame, knobs, names)
    front = points[pareto_front(points, pareto.goals)]
    return points, front.sort_values(names, kind="stable").reset_index(drop=True)


def write_pareto(
    frame: pd.DataFrame, knobs: Sequence[str], pareto: Pareto, folder: Path
) -> tuple[Path, pd.DataFrame]:
    """Plot the points by the first two goals and mark the Pareto front. Return the path and the
    front.

    The front is sorted by the first goal and numbered as in the plot.
    """
    names = [goal.figure for goal in pareto.goals]
    points, front = find_front(frame, knobs, pareto)
    on_front = pareto_front(points, pareto.goals)
    with plot_settings():
        figure = Figure(figsize=(WIDTH, 6.2))
        axes = figure.add_subplot()
        if len(names) == 2:
            style = "steps-pre" if pareto.goals[0].more else "steps-post"
            axes.plot(front[names[0]], front[names[1]], color=RED, linewidth=1.0, drawstyle=style)
        handles = _draw_points(axes, points[~on_front], front, names)
        for goal, axis in zip(pareto.goals[:2], (axes.xaxis, axes.yaxis), strict=True):
            axis.set_label_text(
                f"{heading(goal.figure)}, {'more' if goal.more else 'less'} is better"
            )
        axes.grid(color=GREY, linewidth=0.5)
        _logarithmic(axes, "x", points[names[0]])
        _logarithmic(axes, "y", points[names[1]])
        _number(axes, front[names[:2]].to_numpy(np.float64))
        title = (
            f"Pareto front: {len(front)} of {len(points)} by {', '.join(map(str, pareto.goals))}"
        )
        title_and_legend(figure, title, handles)
        path = save(figure, folder / pareto.file)
    return path, front


def _draw_points(
    axes: Axes, beaten: pd.DataFrame, front: pd.DataFrame, names: Sequence[str]
) -> list[Any]:
    x, y = names[:2]
    for points, colour, size in ((beaten, "#999999", 5.0), (front, RED, 7.0)):
        for hollow in (False, True):
            some = points[points["unserved"] == hollow]
            fill = "white" if hollow else colour
            axes.plot(some[x], some[y], "o", color=colour, mfc=fill, ms=size, zorder=4)
    handles: list[Any] = [
        Line2D([], [], linestyle="", marker="o", color=RED, label="nothing beats it"),
        Line2D([], [], linestyle="", marker="o", color="#999999", label="beaten"),
    ]
    if front["unserved"].any() or beaten["unserved"].any():
        handles.append(_hollow())
    return handles


def _number(axes: Axes, points: npt.NDArray[np.float64]) -> None:
    """Number the points. Neighboring points share one label, such as ``4-8``."""
    axes.figure.draw_without_rendering()  # type: ignore[union-attr]
    shares = axes.transAxes.inverted().transform(axes.transData.transform(points))
    groups: list[list[int]] = []
    for number, share in enumerate(shares):
        near = (g for g in groups if np.abs(shares[g[0]] - share).max() < _CLOSE)
        if (group := next(near, None)) is None:
            groups.append([number])
        else:
            group.append(number)
    for group in groups:
        whole = group == list(range(group[0], group[-1] + 1)) and len(group) > 2
        text = f"{group[0]}-{group[-1]}" if whole else ", ".join(map(str, group))
        right = shares[group[0]][0] > 0.9
        axes.annotate(
            text,
            tuple(points[group[0]]),
            xytext=(-6 if right else 6, 6),
            textcoords="offset points",
            ha="right" if right else "left",
            fontsize=9,
            zorder=5,
        )
