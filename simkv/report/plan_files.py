"""Files of plans: tables, answers and plots."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from simkv.core.atomic_files import make_folder, write_text
from simkv.core.figure_registry import LATENCIES, heading
from simkv.core.version import __version__
from simkv.report.plot_style import (
    BLUE,
    DARK,
    GREY,
    RED,
    WIDTH,
    plot_settings,
    save,
    set_log_scale,
    title_and_legend,
)
from simkv.scenario.objectives import Objective
from simkv.study.plan.capacity_plan import CapacityPlan
from simkv.study.plan.plan_summary import format_value
from simkv.study.plan.plan_tables import cliff_table, evaluations, to_json
from simkv.study.sweep.sweep_table import write_table


def write_plans(plans: Sequence[CapacityPlan], folder: Path) -> list[Path]:
    """Write ``plan.json``, tables and plots of the plans for all variants, and return their
    paths.
    """
    make_folder(folder)
    answer = {"version": __version__, "plans": [to_json(plan) for plan in plans]}
    written = [folder / "plan.json"]
    text = json.dumps(answer, indent=1, allow_nan=False) + "\n"
    write_text(written[0], text)
    tables = {
        "evaluations": [evaluations(plan) for plan in plans],
        "cliff": [cliff_table(plan) for plan in plans if plan.points],
    }
    for name, frames in tables.items():
        if frames:
            written += write_table(pd.concat(frames, ignore_index=True), folder, name)
    for plan in plans:
        label = re.sub(r"[^\w.=-]+", "-", plan.prepared.label)
        end = f"-{label}.png" if label else ".png"
        written.append(draw_answer(plan, folder / f"answer{end}"))
        cliff = draw_cliff(plan, folder / f"cliff{end}")
        written += [] if cliff is None else [cliff]
    return written


#: Maximum number of objectives with a panel; binding objectives are drawn first.
MAX_PANELS = 4
#: Latencies in the cliff plot if no objective limits a latency.
SHOWN_LATENCIES = ("ttft_ms.p99", "e2e_ms.p99")
#: Minimum ratio of the largest to the smallest value for a logarithmic axis.
MIN_LOG_RATIO = 20.0


def draw_answer(plan: CapacityPlan, path: Path) -> Path:
    """Draw one panel per objective: its metric for each tested value, its limit, and the answer.

    Each point is a run with one seed. The line connects the worst runs. The band shows the error
    from the cost profile.
    """
    frame = evaluations(plan)
    frame = frame[~frame["held_back"]]
    knob = plan.prepared.case.knob
    panels = _panels(plan)
    title = f"{plan.prepared.name}: candidates of {knob}"
    with plot_settings():
        figure = Figure(figsize=(WIDTH, 1.2 + 2.6 * len(panels)))
        all_axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
        for axes, objective in zip(all_axes, panels, strict=True):
            _curve(axes, frame, knob, objective.figure, objective)
            if plan.answer is not None:
                axes.axvline(plan.value(plan.answer), color=DARK, linewidth=1.0, linestyle=":")
        all_axes[-1].set_xlabel(knob)
        title_and_legend(figure, title, _legend(plan, frame, "the answer"))
        return save(figure, path)


def draw_cliff(plan: CapacityPlan, path: Path) -> Path | None:
    """Draw latency and unserved requests against the request rate, and return the path.

    The plot shows the plan's answer, or the last candidate if the plan has no answer. Returns None
    if the plan did not vary the request rate.
    """
    if not plan.points:
        return None
    frame = cliff_table(plan)
    frame["unserved_percent"] = 100.0 * frame["unserved"] / frame["requests"]
    panels: list[tuple[str, Objective | None]] = [
        (objective.figure, objective) for objective in _panels(plan) if _is_latency(objective)
    ] or [(name, None) for name in SHOWN_LATENCIES]
    candidate = plan.answer if plan.answer is not None else -1
    case = plan.prepared.case
    title = (
        f"{plan.prepared.name} with {case.knob} = {format_value(case.candidates[candidate])}, by "
        "rate"
    )
    with plot_settings():
        figure = Figure(figsize=(WIDTH, 1.2 + 2.6 * (len(panels) + 1)))
        all_axes = figure.subplots(len(panels) + 1, 1, sharex=True, squeeze=False)[:, 0]
        for axes, (name, objective) in zip(all_axes, panels, strict=False):
            _curve(axes, frame, "rate", name, objective)
        _curve(all_axes[-1], frame, "rate", "unserved_percent", None)
        all_axes[-1].set_ylabel("requests not served (%)")
        all_axes[-1].set_ylim(0, max(1.0, 1.05 * frame["unserved_percent"].max()))
        for axes in all_axes:
            rate = frame.loc[frame["factor"] == 1.0, "rate"].iloc[0]
            axes.axvline(rate, color=DARK, linewidth=1.0, linestyle=":")
        all_axes[-1].set_xlabel("requests per second")
        title_and_legend(figure, title, _legend(plan, frame, "the scenario's rate"))
        return save(figure, path)


def _panels(plan: CapacityPlan) -> list[Objective]:
    """Return the objectives in the order of their panels: binding, given and default ones."""
    binding = [held.objective for held in plan.binding]
    asked = sorted(plan.prepared.case.objectives, key=lambda one: one.assumed)
    return list(dict.fromkeys([*binding, *asked]))[:MAX_PANELS]


def _is_latency(objective: Objective) -> bool:
    return "_ms." in objective.figure or objective.figure == "longest_stall_s"


def _curve(axes: Axes, frame: pd.DataFrame, x: str, name: str, objective: Objective | None) -> None:
    """Draw a metric against ``x``: a point per run, a line through the worst runs, and the error
    band.
    """
    numbers = frame[[x, "side", "failing"]].assign(y=pd.to_numeric(frame[name], errors="coerce"))
    worst = _least if objective and objective.sign == ">=" else _greatest
    calm, failing = numbers[~numbers["failing"]], numbers[numbers["failing"]]
    by_side = calm.groupby([x, "side"])["y"].agg(worst).unstack("side")
    if len(by_side.columns) > 1:
        band = by_side[_comparable(frame, x, name)].dropna()
        low, high = band.min(axis="columns"), band.max(axis="columns")
        axes.fill_between(band.index, low, high, color=BLUE, alpha=0.2, linewidth=0)
    calm, failing = calm[calm["side"] == ""], failing[failing["side"] == ""]
    line = calm.groupby(x)["y"].agg(worst)
    axes.plot(line.index, line, color=BLUE, linewidth=1.4)
    axes.plot(calm[x], calm["y"], "o", color=BLUE, ms=4.0, zorder=4)
    axes.plot(failing[x], failing["y"], "X", color=RED, ms=5.5, zorder=4)
    if objective:
        axes.axhline(objective.limit, color=RED, linewidth=1.0, linestyle=(0, (4, 2)))
    values = [value for value in numbers["y"] if value > 0 and math.isfinite(value)]
    if len(values) == numbers["y"].count() and values and max(values) / min(values) > MIN_LOG_RATIO:
        set_log_scale(axes, "y")
    else:
        _from_nothing(axes, numbers["y"])
    if pd.api.types.is_integer_dtype(frame[x]):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylabel(heading(name))
    axes.grid(color=GREY, linewidth=0.5)


def _least(values: pd.Series[float]) -> float:
    """Return the minimum over several runs; NaN if a run has no sample."""
    return float(values.min(skipna=False))


def _greatest(values: pd.Series[float]) -> float:
    """Return the maximum over several runs; NaN if a run has no sample."""
    return float(values.max(skipna=False))


def _comparable(frame: pd.DataFrame, x: str, name: str) -> pd.Series[bool]:
    """Return, for each x value, whether runs with faster and slower step times are comparable.

    Metrics of finished requests are not comparable if the number of finished requests differs.
    """
    calm = frame[~frame["failing"]]
    same = calm.groupby(x)["finished"].nunique() == 1
    of_finished = name.partition(".")[0] in LATENCIES or name == "longest_stall_s"
    return same | (not of_finished)


def _from_nothing(axes: Axes, values: pd.Series[Any]) -> None:
    """Start the axis of a nonnegative metric at 0."""
    most = values.max()
    if values.min() >= 0.0 and math.isfinite(most):
        axes.set_ylim(0.0, max(1.08 * axes.dataLim.y1, 1e-9) if most > 0 else 1.0)


def _legend(plan: CapacityPlan, frame: pd.DataFrame, line: str) -> Sequence[Any]:
    prepared = plan.prepared
    seeds = f"one seed of {prepared.repeats}" if prepared.repeats > 1 else "a run"
    handles: list[Any] = [Line2D([], [], color=BLUE, marker="o", label=f"{seeds}; line: the worst")]
    if (frame["side"] != "").any():
        handles.append(
            Patch(color=BLUE, alpha=0.2, label="profile's error, if the same number finished")
        )
    if frame["failing"].any():
        handles.append(
            Line2D([], [], color=RED, marker="X", linestyle="", label="one replica failing")
        )
    handles.append(Line2D([], [], color=RED, linestyle=(0, (4, 2)), label="limit"))
    handles.append(Line2D([], [], color=DARK, linestyle=":", label=line))
    return handles
