"""Show scores as tables on the console."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.text import Text

from simkv.report.adaptive_table import make_adaptive_table
from simkv.validation.figure_comparison import FigureComparison
from simkv.validation.recorded_runs.cross_prediction import (
    CROSSED,
    CrossPrediction,
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
    coverage_rows,
    refused_runs,
)
from simkv.validation.recorded_runs.published_statistics import STATISTICS
from simkv.validation.recorded_runs.run_scores import Score
from simkv.validation.recorded_runs.sensitivity import SensitivityScore

TITLES = {"ttft_ms": "TTFT", "tpot_ms": "TPOT", "e2e_ms": "E2E", "queue_ms": "queue"}


def render_run(found: Score, changed: Sequence[SensitivityScore]) -> Iterator[RenderableType]:
    """Yield the tables of one run: measured and predicted values, and errors.

    The errors that the authors of the record published for their own simulator are included.
    """
    yield ""
    yield Text.assemble((found.case.name, "bold"), f": {found.case.facts.model}")
    yield f"costs: {found.profile}"
    for note in found.replayed.notes:
        yield f"note: {note}"
    origin = found.case.facts.origin_simulator.simulator
    head = ("figure", "measured", "predicted", "error", "interval", origin)
    yield make_adaptive_table(
        head, (_cells(f, found.published.get(f.name)) for f in found.figures), kept=4
    )
    for per in found.per_request:
        if per.mape is None:
            yield f"{TITLES[per.metric]}: mean absolute error per request {per.mae_ms:,.1f} ms"
            continue
        beside = "" if per.origin_mape is None else f" ({origin}: {per.origin_mape:.2f} %)"
        yield (
            f"{TITLES[per.metric]}: mean absolute error per request {per.mape:.2f} %{beside}, "
            f"median {per.median_ape:.2f} %, {per.mae_ms:,.1f} ms"
        )
    if changed:
        yield from _changed_parts(found, changed)


def _cells(f: FigureComparison, published: float | None) -> tuple[str, ...]:
    if f.metric in TITLES:
        name, unit = f"{TITLES[f.metric]} {f.statistic} (ms)", 1
    else:
        name, unit = f.metric.replace("_s", " (s)"), 0 if f.metric == "preemptions" else 3
    origin = "" if published is None else f"{published:+.1f} %"
    error = f"{f.error_pct:+.2f} %" if f.real > 1 else ""
    low, high = f.interval or (None, None)
    given = "" if low is None else f"{low:,.{unit}f} to {high:,.{unit}f}"
    return name, f"{f.real:,.{unit}f}", f"{f.predicted:,.{unit}f}", error, given, origin


def _changed_parts(found: Score, changed: Sequence[SensitivityScore]) -> Iterator[RenderableType]:
    yield "Sensitivity (error of the mean and of P99, %):"
    rows = [("as simulated", found), *((other.change, other.score) for other in changed)]
    metrics = ("ttft_ms", "tpot_ms", "e2e_ms")
    cells = ([change, *(_pair(s, metric) for metric in metrics)] for change, s in rows)
    yield make_adaptive_table(("change", "TTFT", "TPOT", "E2E"), cells)


def _pair(s: Score, metric: str) -> str:
    if not s.has(metric):
        return ""
    mean, tail = s.errors(metric, "mean", "p99")
    return f"{mean} / {tail}"


def render_all_runs(
    scores: Sequence[Score], crossed: Sequence[CrossPrediction] = ()
) -> Iterator[RenderableType]:
    """Yield three tables about all runs: the errors, the interval coverage, and the cross
    predictions.

    The first table includes the errors that other projects published for their simulators.
    """
    yield Text("\nErrors of all cases, %", "bold")
    head = ("case", "simulator", "metric", *STATISTICS, "per request")
    yield make_adaptive_table(head, (row for s in scores for row in case_rows(s)), left=3, kept=4)
    yield Text(f"\nFigures within their {STATED_COVERAGE} % interval", "bold")
    yield make_adaptive_table(HEAD, coverage_rows(scores))
    for line in refused_runs(scores):
        yield f"no interval: {line}"
    if crossed:
        yield Text(
            "\nCosts of one run, load of another with the same token budget: errors of means",
            "bold",
        )
        yield make_adaptive_table(CROSSED, cross_prediction_rows(crossed), left=2)


def case_rows(s: Score) -> list[list[str]]:
    """Return one row per metric with the errors of simkv, and one row with published errors.

    The authors of the record published the errors of another simulator.
    """
    rows = []
    origin = s.case.facts.origin_simulator.simulator
    for metric in ("ttft_ms", "tpot_ms", "e2e_ms"):
        if not s.has(metric):
            continue
        per = next((p for p in s.per_request if p.metric == metric), None)
        ours = s.errors(metric, *STATISTICS)
        each = "" if per is None or per.mape is None else f"{per.mape:.2f}"
        rows.append([s.case.name, "simkv", TITLES[metric], *ours, each])
        published = [s.published.get(f"{metric}.{statistic}") for statistic in STATISTICS]
        if any(error is not None for error in published):
            theirs = ["" if error is None else f"{error:+.1f}" for error in published]
            mape = f"{per.origin_mape:.2f}" if per and per.origin_mape is not None else ""
            rows.append(["", origin, "", *theirs, mape])
    return rows


def render_host_times(
    above: Sequence[HostTimes], untold: Sequence[str]
) -> Iterator[RenderableType]:
    """Yield a table of host times by run and kind of step, and a text summary."""
    yield Text("\nHost time above the kernel times, by kind of step", "bold")
    yield make_adaptive_table(HOST_TIME_COLUMNS, step_cells(above), left=2)
    yield from map(describe_host_times, above)
    for reason in untold:
        yield f"not determined: {reason}"
