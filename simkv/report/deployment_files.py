"""Files and console table of a search for deployments (``simkv plan --tune``)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from simkv.core.atomic_files import make_folder, write_text
from simkv.core.version import __version__
from simkv.report.adaptive_table import AdaptiveTable, make_adaptive_table
from simkv.report.plot_style import (
    BLUE,
    DARK,
    GREY,
    RED,
    SLATE,
    WIDTH,
    plot_settings,
    save,
    title_and_legend,
)
from simkv.study.plan.deployment_search import DeploymentSearch, PlannedDeployment
from simkv.study.plan.deployment_tables import (
    deployment_rows,
    describe_deployment,
    find_best,
)
from simkv.study.sweep.sweep_table import make_typed_frame, write_table


def make_front_table(search: DeploymentSearch) -> AdaptiveTable:
    """Return the table of the Pareto front, sorted by increasing TPOT."""
    front = search.front
    shown: dict[str, list[str]] = {
        "GPU": [one.layout.place for one in front],
        "deployment": [one.name for one in front],
        "GPUs": [str(one.gpus) for one in front],
        "tok/s per GPU": [f"{one.tok_s_per_gpu:.4g}" for one in front],
        "mean TPOT (ms)": [f"{one.tpot_ms:.3g}" for one in front],
        "P99 TTFT (s)": [
            "" if one.ttft_ms is None else f"{one.ttft_ms / 1e3:.3g}" for one in front
        ],
        "tokens per step": [str(one.layout.step_tokens) for one in front],
        "cost per M output tokens": [_cost(one) for one in front],
        "step times": [one.layout.prepared.error.mark for one in front],
    }
    shown = {name: cells for name, cells in shown.items() if any(cells)}
    left = 2 if "GPU" in shown else 1
    rows = list(zip(*shown.values(), strict=True))
    return make_adaptive_table(list(shown), rows, left=left, kept=left + 4)


def _cost(one: PlannedDeployment) -> str:
    each = one.cost and one.cost.per_million_output_tokens
    return "" if each is None else f"{each:.3g}"


def write_search(search: DeploymentSearch, folder: Path) -> list[Path]:
    """Write ``plan.json``, ``deployments.csv`` and ``pareto.png``, and return their paths."""
    make_folder(folder)
    rows = deployment_rows(search)
    best = {what: describe_deployment(one) for what, one in find_best(search)}
    answer = {"version": __version__, "deployments": rows, "best": best}
    written = [folder / "plan.json"]
    write_text(written[0], json.dumps(answer, indent=1, allow_nan=False) + "\n")
    flat = [
        {**row, "cost": row["cost"] and row["cost"]["per_million_output_tokens"]} for row in rows
    ]
    written += write_table(make_typed_frame(flat), folder, "deployments")
    return [*written, draw_pareto(search, folder / "pareto.png")]


def draw_pareto(search: DeploymentSearch, path: Path) -> Path:
    """Draw tok/s per GPU against mean TPOT for the Pareto front and all other deployments."""
    drawn = [one for one in search.deployments if one.tpot_ms is not None]
    with plot_settings():
        figure = Figure(figsize=(WIDTH, 5.0))
        axes = figure.add_subplot()
        _draw(axes, [one for one in drawn if one.meets is False], SLATE, "white")
        _draw(axes, [one for one in drawn if one.meets is not False], BLUE, BLUE)
        front = search.front
        axes.plot(*_places(front), color=RED, linewidth=1.0, drawstyle="steps-post")
        _draw(axes, front, RED, RED)
        for one in front:
            axes.annotate(
                one.name,
                (one.tpot_ms or 0.0, one.tok_s_per_gpu),
                textcoords="offset points",
                xytext=(6, 4),
                fontsize=7,
            )
        axes.set_xlabel("mean TPOT (ms), less is better")
        axes.set_ylabel("output tok/s per GPU, more is better")
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        axes.grid(color=GREY, linewidth=0.5)
        handles = [
            Line2D([], [], color=RED, marker="o", label="Pareto front"),
            Line2D([], [], color=BLUE, marker="o", linestyle="", label="meets the objectives"),
            Line2D([], [], color=SLATE, mfc="white", marker="o", linestyle="", label="misses one"),
            Line2D([], [], color=DARK, marker="s", linestyle="", label="prefill/decode split"),
        ]
        name = search.layouts[0].prepared.name
        title_and_legend(figure, f"{name}: throughput per GPU and latency", handles)
        return save(figure, path)


def _draw(axes: Axes, deployments: Sequence[PlannedDeployment], color: str, fill: str) -> None:
    """Draw deployments as circles, and disaggregated deployments as squares."""
    for marker, split in (("o", False), ("s", True)):
        some = [one for one in deployments if bool(one.layout.prefill) is split]
        axes.plot(*_places(some), marker, color=color, mfc=fill, ms=5.0, zorder=4)


def _places(deployments: Sequence[PlannedDeployment]) -> tuple[list[float], list[float]]:
    """Return the TPOT values and the tok/s per GPU of the deployments."""
    return [one.tpot_ms or 0.0 for one in deployments], [one.tok_s_per_gpu for one in deployments]
