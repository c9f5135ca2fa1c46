"""``simkv sweep``: run a scenario over ranges of its settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from simkv.cli.command_support import (
    Address,
    AsJson,
    ExecutorOption,
    Jobs,
    ScenarioArgument,
    Source,
    Trust,
    check_store,
    open_job_runner,
    print_error,
    print_json,
    show,
)
from simkv.core.atomic_files import write_text
from simkv.core.errors import InputError
from simkv.core.version import __version__

if TYPE_CHECKING:
    import pandas as pd

    from simkv.report.sweep_plots import Pareto, Plot
    from simkv.study.sweep.sweep import Sweep

#: Columns of the printed table, and its maximum number of rows.
SHOWN = ("verdict", "finished", "output_throughput", "ttft_ms.p99", "e2e_ms.p99", "preemptions")
MOST_ROWS = 40


def sweep(
    scenario: ScenarioArgument,
    over: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATH=VALUES",
            help="Setting and its values. PATH is a scenario field, as in --set, or 'variants' to "
            "select variants by name. VALUES is a,b,c or LOW..HIGH:STEP or LOW..HIGH:n=COUNT or "
            "LOW..HIGH:log=COUNT; with --sample, it is LOW..HIGH or LOW..HIGH:log. May be "
            "repeated; the sweep then runs all combinations.",
        ),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="PATH=VALUE",
            help="Override a field of the scenario at all points of the sweep; may be repeated.",
        ),
    ] = None,
    _source: Source = None,
    _trusted: Trust = False,
    sample: Annotated[
        str | None,
        typer.Option(
            metavar="random:N|lhs:N",
            help="Sample N points instead of running a full grid: random:N (uniform) or lhs:N "
            "(Latin hypercube).",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Random seed for --sample.")] = 0,
    repeats: Annotated[
        int,
        typer.Option(
            min=1, help="Number of runs per point, each with another seed of the workload."
        ),
    ] = 1,
    plot: Annotated[
        list[str] | None,
        typer.Option(
            metavar="METRIC:SETTING",
            help="Plot this metric of summary.json against this setting; may be repeated.",
        ),
    ] = None,
    pareto: Annotated[
        list[str] | None,
        typer.Option(
            metavar="METRIC:max,METRIC:min",
            help="Plot the Pareto front of these metrics; may be repeated.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Write results to this directory (default: runs/<scenario>-sweep/). Existing "
            "results are reused.",
        ),
    ] = None,
    jobs: Jobs = None,
    executor: ExecutorOption = "local",
    address: Address = None,
    as_json: AsJson = False,
) -> None:
    """Run a scenario over ranges of its settings.

    Write one table, plots and Pareto fronts. If you interrupt a sweep, run the same command again
    to continue it.
    """
    from simkv.core.figure_registry import FLEET_METRICS
    from simkv.report.sweep_plots import parse_pareto, parse_plot
    from simkv.scenario.packaged_scenarios import find_scenario
    from simkv.study.sweep.sweep import build_sweep, run_sweep
    from simkv.study.sweep.sweep_table import build_sweep_table
    from simkv.study.sweep_axes import VARIANTS_AXIS, parse_axis, parse_sample

    if not over:
        raise InputError(
            "--over: expected a setting and its values, such as engine.block_size=16,32"
        )
    if address is not None and executor != "ray":
        raise InputError(f"--ray-address {address}: requires --executor ray")
    axes = [parse_axis(text) for text in over]
    knobs = [axis.path for axis in axes if axis.path != VARIANTS_AXIS]
    plots = [parse_plot(text, knobs) for text in plot or []]
    paretos = [parse_pareto(text) for text in pareto or []]
    drawn = None if sample is None else parse_sample(sample)
    scenario = find_scenario(scenario)
    whole = build_sweep(scenario, axes, set_ or [], drawn, seed, repeats)
    drawn_figures = [p.figure for p in plots] + [g.figure for p in paretos for g in p.goals]
    for figure in drawn_figures:
        if figure in FLEET_METRICS and any(run.job.scenario.fleet is None for run in whole.runs):
            raise InputError(
                f"{figure}: this metric requires a fleet at every point of the sweep; some points "
                f"have no fleet"
            )
    folder = out or Path("runs") / f"{whole.name}-sweep"
    check_store(folder, "sweep")
    for note in whole.notes:
        print_error(f"note: {note}")
    for knob in whole.idle_knobs:
        print_error(f"note: {knob} has no effect at any point of the sweep")
    with open_job_runner(folder, jobs, executor, address) as (runner, advance):
        summaries = run_sweep(whole, runner, advance)
    asked = {
        "version": __version__,
        "scenario": str(scenario),
        "over": over,
        "set": set_ or [],
        "sample": sample,
        "seed": seed,
        "repeats": repeats,
    }
    _write(whole, build_sweep_table(whole, summaries), plots, paretos, folder, asked, as_json)


def _write(
    whole: Sweep,
    frame: pd.DataFrame,
    plots: list[Plot],
    paretos: list[Pareto],
    folder: Path,
    asked: dict[str, Any],
    as_json: bool,
) -> None:
    """Write tables and plots, and print a summary."""
    from simkv.metrics.fidelity import warn_mixed_bases
    from simkv.report.sweep_plots import write_pareto, write_plot
    from simkv.study.sweep.sweep_table import write_table

    write_text(folder / "sweep.json", json.dumps(asked, indent=1) + "\n")
    written = write_table(frame, folder)
    written += [write_plot(frame, whole.knobs, one, folder) for one in plots]
    changing = [name for name in (*whole.knobs, "variant") if frame[name].astype(str).nunique() > 1]
    repeated = ["repeat"] if frame["repeat"].max() else []
    if as_json:
        from simkv.report.json_answers import SweepAnswer

        for one in paretos:
            write_pareto(frame, whole.knobs, one, folder)
        rows = [{str(key): value for key, value in row.items()} for row in frame.to_dict("records")]
        print_json(SweepAnswer(scenario=whole.name, rows=rows, folder=str(folder)))
        return
    # Rows with different step times are marked; a line below the table names a common basis.
    marked = ["step_times"] if frame["step_times"].nunique() > 1 else []
    table = _short(frame[[*changing, *repeated, *marked, *SHOWN]])
    show(f"{whole.name}: {len(frame)} runs", table)
    if len(frame) > MOST_ROWS:
        show(f"and {len(frame) - MOST_ROWS} more rows in table.csv")
    if not marked:
        show(f"Step times: {frame['step_times'].iloc[0]}")
    show(*warn_mixed_bases(frame["step_times"]))
    by_point = frame.drop_duplicates(["point", "variant"])[["point", "variant", "step_times"]]
    for one in paretos:
        path, front = write_pareto(frame, whole.knobs, one, folder)
        written.append(path)
        names = [goal.figure for goal in one.goals]
        front = front.merge(by_point, on=["point", "variant"], how="left")
        show(
            f"\nPareto front by {', '.join(map(str, one.goals))}; numbers refer to {path.name}",
            _short(front[[*changing, *marked, *names]], numbered=True),
        )
    show(f"Written to {folder}: {', '.join(path.name for path in written)}")
    if (folder / "table.parquet") not in written:
        show("table.parquet needs pyarrow: pip install 'simkv[parquet]'")


def _short(frame: pd.DataFrame, numbered: bool = False) -> Any:
    """Return the first rows as a table for the terminal."""
    import pandas as pd

    from simkv.report.adaptive_table import AdaptiveTable, Column

    def said(value: Any) -> str:
        return "" if pd.isna(value) else f"{value:.6g}" if isinstance(value, float) else str(value)

    first = frame.head(MOST_ROWS)
    numbers = [Column("", list(map(str, range(len(first)))))] if numbered else []
    ranks = {name: rank for rank, name in enumerate(SHOWN, start=1)}
    columns = [
        Column(
            str(name),
            [said(value) for value in first[name]],
            ranks.get(str(name), 0),
            right=name not in ("variant", "verdict", "step_times"),
        )
        for name in first
    ]
    return AdaptiveTable([*numbers, *columns])
