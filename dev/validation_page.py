"""Generate docs/validation.md and its picture: ``python -m dev.validation_page FILE CASE...``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Annotated

import typer
from jinja2 import Environment
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas

from dev.token_budgets.budget_pairs import Pair, made, near, table
from simkv.cli.validate import judge_cases, measure_host_times
from simkv.core.atomic_files import make_folder, write_text
from simkv.costs.sources.launch_overhead import MEASURED_IN
from simkv.report.plot_style import (
    BLUE,
    DARK,
    GREY,
    RED,
    SLATE,
    WIDTH,
    plot_settings,
    save,
)
from simkv.validation.figure_comparison import FigureComparison, markdown
from simkv.validation.recorded_runs.cross_prediction import (
    CROSSED,
    CrossPrediction,
    cross_predict,
    cross_prediction_rows,
)
from simkv.validation.recorded_runs.host_gaps import (
    HOST_TIME_COLUMNS,
    HostTimes,
    describe_host_times,
    step_cells,
)
from simkv.validation.recorded_runs.interval_coverage import (
    HEAD,
    STATED_COVERAGE,
    coverage,
    coverage_rows,
    refused_runs,
)
from simkv.validation.recorded_runs.recorded_run import find_recorded_runs
from simkv.validation.recorded_runs.run_scores import Score
from simkv.validation.recorded_runs.score_tables import TITLES, case_rows
from simkv.validation.recorded_runs.sensitivity import SensitivityScore

_HEAD = ["figure", "measured", "predicted", "error", "interval"]
METRICS = ("ttft_ms", "tpot_ms", "e2e_ms")
PAGE = Path(__file__).parent / "validation_page.md.j2"


def write_docs(
    path: Path,
    scores: Sequence[Score],
    changed: dict[str, list[SensitivityScore]],
    crossed: Sequence[CrossPrediction] = (),
    pairs: Sequence[Pair] = (),
    above: Sequence[HostTimes] = (),
) -> list[str]:
    """Write the page to ``path`` and the picture to the same directory; return the names of the two
    files.
    """
    picture = path.with_name("validation.png")
    with plot_settings():
        save(draw(scores), picture)
    template = Environment(autoescape=False, keep_trailing_newline=True).from_string(
        PAGE.read_text(encoding="utf-8")
    )
    cases = "\n".join(_case(s, changed.get(s.case.name, [])) for s in scores)
    write_text(
        path,
        template.render(
            users=_for_users(scores),
            table=_table(scores),
            known="\n".join(markdown(_KNOWN, map(_provenance, scores), 6)),
            crossed="\n".join(markdown(CROSSED, cross_prediction_rows(crossed), 2)),
            budgets="\n".join(table(pairs)),
            near=near(pairs),
            steps="\n".join(markdown(HOST_TIME_COLUMNS, step_cells(above), 2)),
            words="\n".join(f"- {describe_host_times(one)}" for one in above),
            cases=cases,
        ),
    )
    return [path.name, picture.name]


_KNOWN = ["case", "costs from", "GPU", "settings and budget", "load and rate", "so it is a"]


def _for_users(scores: Sequence[Score]) -> dict[str, str | int]:
    """Return the values in the first lines of the page; errors are in percent."""
    figures = [f for s in scores for f in s.figures if f.metric in METRICS]
    means = [abs(f.error_pct) for f in figures if f.statistic == "mean"]
    tails = [abs(f.error_pct) for f in figures if f.statistic == "p99"]
    found = coverage(scores)
    return {
        "runs": len(scores),
        "own": sum(s.fitted_to_itself or s.case.name in MEASURED_IN for s in scores),
        "worst": f"{max(means, default=0.0):.1f}",
        "typical": f"{median(means or [0.0]):.1f}",
        "tail": f"{max(tails, default=0.0):.1f}",
        "held": found.held,
        "figures": found.figures,
        "stated": STATED_COVERAGE,
    }


def _provenance(s: Score) -> list[str]:
    """Return the cells with the source of a run's costs and the inputs that were known."""
    if s.fitted_to_itself:
        alone = int((~s.case.scored).sum()) - 1
        settings = ["the run's own", "the run's own", "not seen"]
        what = "replay at its settings, prediction of the load"
        return [s.case.name, f"{alone} requests alone in this run", *settings, what]
    row = [s.case.name, "kernel tables", "its kind", "not seen", "not seen", "prediction"]
    if s.case.name in MEASURED_IN:
        row[1], row[-1] = (
            "kernel tables, host time of this run",
            "prediction except for the host time",
        )
    return row


def _table(scores: Sequence[Score]) -> str:
    head = ["case", "simulator", "metric", "mean", "P50", "P90", "P95", "P99", "per request"]
    lines = markdown(head, (row for s in scores for row in case_rows(s)), 3)
    errors = "## All cases, error in percent\n\n" + "\n".join(lines) + "\n"
    held = "\n".join(markdown(HEAD, coverage_rows(scores), 1))
    none = "".join(f"- no interval: {line}\n" for line in refused_runs(scores))
    return (
        f"{errors}\n## Metrics within their interval, target {STATED_COVERAGE} %\n\n{held}\n{none}"
    )


def _case(s: Score, changed: Sequence[SensitivityScore]) -> str:
    facts, setup = s.case.facts, s.case.facts.engine
    config = s.replayed.config
    lines = [
        f"## {s.case.name}",
        "",
        f"{facts.model} on {setup.gpu}, {setup.engine} {setup.version}, {len(s.case.requests)} "
        f"requests, {int(s.case.scored.sum())} of them compared; {config.num_gpu_blocks} KV blocks "
        f"of {config.block_size} tokens. Costs: {s.profile}. "
        f"{s.replayed.preemptions} preemptions in the simulation.",
        "",
        *[f"- {note}" for note in s.replayed.notes],
        *([""] if s.replayed.notes else []),
        *markdown(_HEAD, map(_line, s.figures), 1),
        "",
    ]
    if changed:
        lines += [
            "Sensitivity to unknown settings (error of the mean / of P99, in percent):",
            "",
            *markdown(["change", "TTFT", "TPOT", "E2E"], map(_otherwise, changed), 1),
            "",
        ]
    return "\n".join(lines)


def _line(f: FigureComparison) -> list[str]:
    name = f"{TITLES[f.metric]} {f.statistic} (ms)" if f.metric in TITLES else f.metric
    error = f"{f.error_pct:+.2f} %" if f.real > 1 else ""
    given = f"{f.interval[0]:,.1f} to {f.interval[1]:,.1f}" if f.interval else ""
    return [name, f"{f.real:,.1f}", f"{f.predicted:,.1f}", error, given]


def _otherwise(o: SensitivityScore) -> list[str]:
    cells = []
    for metric in METRICS:
        if not o.score.has(metric):
            cells.append("")
            continue
        mean, tail = o.score.errors(metric, "mean", "p99")
        cells.append(f"{mean} / {tail}")
    return [o.change, *cells]


def draw(scores: Sequence[Score], most: float = 10.0) -> Canvas:
    """Plot errors by case, metric and statistic; errors above ``most`` percent are clipped."""
    figure = Canvas(figsize=(WIDTH, 0.9 + 0.72 * len(scores)))
    panels = figure.subplots(1, len(METRICS), sharey=True, squeeze=False)[0]
    for axes, metric in zip(panels, METRICS, strict=True):
        _panel(axes, scores, metric, most)
    panels[0].set_yticks(range(len(scores)), [s.case.name for s in scores])
    panels[0].invert_yaxis()
    first = panels[0]
    marks = [
        *first.plot([], [], "o", color=BLUE, label="simkv: mean"),
        *first.plot([], [], "|", color=BLUE, ms=10, label="simkv: P50, P90, P95, P99"),
        *first.plot([], [], "o", color=SLATE, mfc="none", label="the simulator it is from"),
    ]
    figure.legend(handles=marks, loc="outside lower center", ncols=3, frameon=False)
    return figure


def _panel(axes: Axes, scores: Sequence[Score], metric: str, most: float) -> None:
    axes.axvspan(-1, 1, color=GREY, alpha=0.5, lw=0)
    axes.axvline(0, color=DARK, lw=0.8)
    for row, s in enumerate(scores):
        for f in (f for f in s.figures if f.metric == metric):
            marker, size = ("o", 7) if f.statistic == "mean" else ("|", 12)
            inside = max(min(f.error_pct, most), -most)
            colour = BLUE if inside == f.error_pct else RED
            axes.plot(inside, row - 0.14, marker, color=colour, ms=size, mew=1.6, clip_on=False)
            if (published := s.published.get(f.name)) is not None:
                there = max(min(published, most), -most)
                axes.plot(there, row + 0.2, marker, color=SLATE, mfc="none", ms=size, clip_on=False)
    axes.set_xlim(-most, most)
    axes.set_ylim(-0.6, len(scores) - 0.4)
    axes.set_xlabel("error (%)")
    axes.set_title(TITLES[metric], loc="left")
    axes.grid(axis="x", color=GREY, lw=0.5)


def main(
    report: Annotated[Path, typer.Argument(metavar="FILE", help="Markdown file to write.")],
    cases: Annotated[list[Path], typer.Argument(metavar="CASE…", help="Recorded runs.")],
    kernel_tables: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Further directory of kernel tables.")
    ] = None,
) -> None:
    """Simulate recorded runs and write a report about all of them."""
    folders = [folder for named in cases for folder in find_recorded_runs(named)]
    found = judge_cases(folders, None, kernel_tables, varied=True)
    crossed = list(cross_predict(found.scores, found.costs))
    above, _ = measure_host_times(found)
    pairs = list(made(_tables(folders, kernel_tables)))
    make_folder(report.parent)
    print(*write_docs(report, found.scores, found.changed, crossed, pairs, above))
    for reason in found.unusable:
        print(reason)
    if found.unusable:
        raise typer.Exit(2)


def _tables(folders: list[Path], given: Path | None) -> list[Path]:
    """Return the folders of kernel tables: the folders in the same directories as the cases, and
    the given folder.
    """
    beside = [folder.resolve().parent / "calibration" for folder in folders]
    return [path for path in dict.fromkeys([*beside, *([given] if given else [])]) if path.is_dir()]


if __name__ == "__main__":
    typer.run(main)
