"""Generate the page about measured points, with tables by group and plots of predicted against
measured values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dev.serving_points.fit_tables import CONSTANT_HEAD, FIT_HEAD, constant_rows, fit_rows
from dev.serving_points.point_calibration import Calibrated, rules_of
from simkv.core.atomic_files import write_text
from simkv.report.plot_style import (
    BLUE,
    GREY,
    RED,
    SLATE,
    WIDTH,
    YELLOW,
    plot_settings,
    save,
    set_log_scale,
)
from simkv.validation.figure_comparison import markdown
from simkv.validation.serving_points.point_prediction import CLIENT_MS, Prediction
from simkv.validation.serving_points.point_scores import (
    LATENCY_NAMES,
    class_of,
    is_trusted,
    noise,
    score_groups,
)
from simkv.validation.serving_points.point_tables import (
    HEAD,
    noise_lines,
    percent,
    score_rows,
)

TEMPLATE = Path(__file__).parent / "points_page.md.j2"
COLOURS = (BLUE, YELLOW, RED, GREY)


def write_page(path: Path, found: Calibrated, command: str) -> list[str]:
    """Write the page to ``path`` and the picture to the same directory; return the names of the two
    files.
    """
    picture = path.with_name(f"{path.stem}.png")
    with plot_settings():
        save(draw(found.left_out), picture)
    tables = [
        _tables("Configurations left out", found.left_out),
        _tables("Pairs of model and GPU left out", found.unseen),
    ]
    refused = [p for p in found.left_out if p.latency is None and is_trusted(p)]
    whys = sorted({p.why for p in refused})
    apart = [p.row for p in found.left_out if not is_trusted(p)]
    template = Environment(autoescape=False, keep_trailing_newline=True).from_string(
        TEMPLATE.read_text(encoding="utf-8")
    )
    text = template.render(
        command=command,
        picture=picture.name,
        client_ms=CLIENT_MS,
        rows=len(found.left_out),
        refused=[f"{sum(p.why == why for p in refused)} rows ({why})" for why in whys],
        apart=len(apart),
        noise=list(noise_lines(noise([p.row for p in found.left_out]))),
        provenance=dict(found.sources.provenance),
        classes="\n".join(markdown(CLASS_HEAD, _class_rows(found), 1)),
        seen=found.covered["configurations"],
        tried="\n".join(markdown(FIT_HEAD, fit_rows(found.fitted), 1)),
        covered=found.covered,
        tables="\n".join(tables),
        constants=constants_table(rules_of(found.samples, found.fitted, "")),
    )
    write_text(path, text)
    return [path.name, picture.name]


def constants_table(rules: Sequence[Mapping[str, Any]]) -> str:
    """Return the values of ``constants.json`` as a Markdown table."""
    return "\n".join(markdown(CONSTANT_HEAD, constant_rows(rules), 1))


CLASS_HEAD = ["class", "TTFT", "TPOT", "TTFT, pair not fitted", "TPOT, pair not fitted"]


def _class_rows(found: Calibrated) -> list[list[str]]:
    """Return the errors of each class, with configurations and with pairs held out."""
    groups = [score_groups(predictions)["class"] for predictions in (found.left_out, found.unseen)]
    return [
        [one.name, *(percent(g.errors[n].mape) for g in (one, other) for n in LATENCY_NAMES)]
        for one, other in zip(*groups, strict=True)
    ]


def _tables(title: str, predictions: Sequence[Prediction]) -> str:
    parts = []
    for name, group in score_groups(predictions).items():
        # suspect rows are not used for the fit, so they are not held out
        if not name.startswith("suspect"):
            lines = "\n".join(markdown(HEAD, score_rows(group), 1))
            parts.append(f"### By {name}\n\n{lines}\n")
    return f"## {title}\n\n" + "\n".join(parts)


def draw(predictions: Sequence[Prediction]) -> Figure:
    """Plot predicted against measured values by class, one panel for each latency."""
    measured = [p for p in predictions if p.row.measured and p.latency and is_trusted(p)]
    classes = sorted({class_of(p.row) for p in measured})
    figure = Figure(figsize=(WIDTH, 0.55 * WIDTH))
    panels = figure.subplots(1, len(LATENCY_NAMES), squeeze=False)[0]
    for index, (axes, name) in enumerate(zip(panels, LATENCY_NAMES, strict=True)):
        _panel(axes, measured, classes, index)
        axes.set_title(f"{name.upper()} (ms)", loc="left")
    marks, labels = panels[0].get_legend_handles_labels()
    figure.legend(marks, labels, loc="outside lower center", ncols=len(classes), frameon=False)
    return figure


def _panel(
    axes: Axes, predictions: Sequence[Prediction], classes: Sequence[str], index: int
) -> None:
    ends = [1e9, 0.0]
    for name, colour in zip(classes, COLOURS, strict=False):
        own = [p for p in predictions if class_of(p.row) == name]
        xs = [p.row.measured[index] for p in own if p.row.measured]
        ys = [p.latency[index] for p in own if p.latency]
        axes.plot(xs, ys, "o", ms=2.5, mew=0, alpha=0.6, color=colour, label=name)
        ends = [min(ends[0], *xs, *ys), max(ends[1], *xs, *ys)]
    axes.plot(ends, ends, color=SLATE, lw=0.8)
    axes.set(xlabel="measured", ylabel="predicted")
    subs = (1.0,) if ends[1] > 1e3 * ends[0] else (1.0, 2.0, 5.0)  # minor labels would overlap
    for which in ("x", "y"):
        set_log_scale(axes, which, subs)
