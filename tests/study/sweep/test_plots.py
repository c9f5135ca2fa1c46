"""Tests of plots of metrics against knobs, and of Pareto fronts."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from simkv.core.errors import InputError
from simkv.report import sweep_plots
from simkv.report.plot_style import WIDTH, plot_settings, title_and_legend
from simkv.report.sweep_plots import (
    ParetoGoal,
    average_repeats,
    pareto_front,
    parse_pareto,
    parse_plot,
    write_pareto,
    write_plot,
)

KNOBS = ("engine.a", "engine.b")
E2E = "e2e_ms.p99"


@pytest.fixture
def frame() -> pd.DataFrame:
    """Return a table of two knobs (one of them a text) with three repeats; at one point, no request
    finished.
    """
    rows = [
        {
            "point": 2 * a + b,
            "engine.a": 2**a,
            "engine.b": "xy"[b],
            "variant": "run",
            "repeat": repeat,
            "requests": 10,
            "finished": 0 if (a, b) == (0, 0) else 10 - (a == 1),
            "output_throughput": 10.0 * a,
            E2E: math.nan if (a, b) == (0, 0) else 100.0 * (a + 1) + 10 * b + repeat,
        }
        for a in range(3)
        for b in range(2)
        for repeat in range(3)
    ]
    return pd.DataFrame(rows)


def test_means_and_confidence_intervals(frame: pd.DataFrame) -> None:
    points = average_repeats(frame, KNOBS, [E2E]).set_index("point")
    assert points.loc[1, E2E] == 111.0
    # Student's t for 2 degrees of freedom is 4.3027; the standard deviation of 0, 1, 2 is 1.
    assert points.loc[1, f"±{E2E}"] == pytest.approx(4.302653 / math.sqrt(3))
    assert math.isnan(float(str(points.loc[0, E2E])))
    assert list(points["unserved"]) == [True, False, True, True, False, False]
    once = average_repeats(frame[frame["repeat"] == 0], KNOBS, [E2E])
    assert once[f"±{E2E}"].isna().all()


def test_front_contains_undominated_points() -> None:
    points = pd.DataFrame(
        {
            "up": [1.0, 2.0, 3.0, 3.0, 2.0, 9.0, 1.0],
            "down": [1.0, 2.0, 3.0, 3.0, 3.0, math.nan, 1.5],
        }
    )
    front = pareto_front(points, [ParetoGoal("up", True), ParetoGoal("down", False)])
    assert list(front) == [True, True, True, True, False, False, False]
    front = pareto_front(points, [ParetoGoal("up", False), ParetoGoal("down", False)])
    assert list(front) == [True, False, False, False, False, False, False]


@pytest.mark.parametrize(
    ("knob", "names"), [("engine.a", KNOBS), ("engine.b", KNOBS), ("variant", KNOBS)]
)
def test_plots_are_deterministic(
    frame: pd.DataFrame, tmp_path: Path, knob: str, names: tuple[str, ...]
) -> None:
    plot = parse_plot(f"{E2E}:{knob}", names)
    path = write_plot(frame, names, plot, tmp_path)
    first = path.read_bytes()
    assert first.startswith(b"\x89PNG")
    assert len(first) > 5000
    assert write_plot(frame, names, plot, tmp_path).read_bytes() == first
    changed = frame.assign(**{E2E: frame[E2E] * 2 + frame["engine.a"] ** 3})
    assert write_plot(changed, names, plot, tmp_path).read_bytes() != first


def test_writes_pareto_plot_and_table(frame: pd.DataFrame, tmp_path: Path) -> None:
    path, front = write_pareto(
        frame, KNOBS, parse_pareto(f"output_throughput:max,{E2E}:min"), tmp_path
    )
    assert path.name == "pareto-output_throughput-e2e_ms.p99.png"
    assert path.read_bytes().startswith(b"\x89PNG")
    # (0, y), (1, x) and (2, x): with b = y, all other points are slower.
    assert front["point"].tolist() == [1, 2, 4]
    assert front["output_throughput"].tolist() == [0.0, 10.0, 20.0]


def test_empty_front(frame: pd.DataFrame, tmp_path: Path) -> None:
    nothing = frame.assign(**{E2E: math.nan})
    goals = f"{E2E}:min,steps:max"
    path, front = write_pareto(nothing.assign(steps=3), KNOBS, parse_pareto(goals), tmp_path)
    assert path.exists()
    assert front[[*KNOBS, E2E]].empty


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("e2e_ms.p9:engine.a", "did you mean 'e2e_ms.p9"),
        ("e2e_ms.p99:engine.c", "not a setting of this sweep"),
        ("e2e_ms.p99", "expected METRIC:SETTING"),
    ],
)
def test_rejects_invalid_plots(text: str, what: str) -> None:
    with pytest.raises(InputError, match=what):
        parse_plot(text, KNOBS)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("steps", "expected METRIC:max"),
        ("steps:more", "expected METRIC:max"),
        ("steps:max", "two or more"),
        ("steps:max,steps:min", "two or more"),
        ("step:max,steps:min", "did you mean 'steps'"),
    ],
)
def test_rejects_invalid_fronts(text: str, what: str) -> None:
    with pytest.raises(InputError, match=what):
        parse_pareto(text)


def test_overlapping_points_share_label() -> None:
    axes = Figure().add_subplot()
    points = np.array([[0.0, 1.0], [5.0, 5.0], [10.0, 9.0], [10.0, 9.0], [10.01, 9.0], [5.0, 5.02]])
    axes.plot(points[:, 0], points[:, 1], "o")
    sweep_plots._number(axes, points)
    assert [text.get_text() for text in axes.texts] == ["0", "1, 5", "2-4"]


def test_lines_are_distinct_and_legend_fits() -> None:
    looks = {(colour, stroke) for colour in sweep_plots.COLOURS for stroke in sweep_plots.STROKES}
    assert len(looks) == sweep_plots.MAX_LINES == 15
    names = [f"engine.max_num_batched_tokens={2048 * n}, bucketed" for n in range(9)]
    handles = [Line2D([], [], label=name) for name in names]
    with plot_settings():
        figure = Figure(figsize=(WIDTH, 5.0))
        figure.add_subplot()
        title_and_legend(figure, "x", handles)
        figure.draw_without_rendering()
    (legend,) = figure.legends
    assert legend.get_window_extent().x1 <= figure.bbox.x1


def test_most_influential_knob_gets_colors(frame: pd.DataFrame) -> None:
    """The forty settings have two knobs: ``b`` affects the metric, and ``c`` hardly does."""
    rows = [{"engine.b": b, "engine.c": c, E2E: 100.0 * b + c} for b in range(4) for c in range(10)]
    points = pd.DataFrame(rows)
    assert sweep_plots._matters_most(points, ["engine.c", "engine.b"], E2E) == "engine.b"
    looks = {str(number): sweep_plots._look(number, 40) for number in range(40)}
    assert len({look["color"] for look in looks.values()}) == 40
    assert [name for name, _ in sweep_plots._ends(looks)][::6] == ["0", "39"]
