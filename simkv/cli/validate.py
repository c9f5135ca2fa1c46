"""``simkv validate``: compare simulations with measurements.

simkv validate CASE...                recorded runs of real engines, simulated and compared
simkv validate FILE... --gpu H100     results of load generators, predicted and compared
simkv validate silicon ROWS.csv       published serving points, replayed and compared
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from simkv.cli.command_support import (
    AsJson,
    Overrides,
    print_error,
    print_json,
    progress,
    show,
)
from simkv.core.atomic_files import check_folder, make_folder
from simkv.core.errors import InputError
from simkv.scenario.scenario_options import ScenarioOptions

if TYPE_CHECKING:
    from rich.console import RenderableType

    from simkv.costs.cost_profile import CostProfile
    from simkv.validation.benchmark_check import CheckedBenchmark
    from simkv.validation.recorded_runs.host_gaps import HostTimes
    from simkv.validation.recorded_runs.run_scores import Score
    from simkv.validation.recorded_runs.sensitivity import SensitivityScore
    from simkv.validation.serving_points.measured_rows import MeasuredRow
    from simkv.validation.serving_points.point_prediction import Prediction

#: Command used if none is given.
DEFAULT = "case"


class DefaultCommand(TyperGroup):
    """Command group in which ``simkv validate X`` is short for ``simkv validate case X``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        known = args and (args[0] in self.commands or args[0] in ("--help", "-h"))
        if args and not known and DEFAULT in self.commands:
            args.insert(0, DEFAULT)
        return super().parse_args(ctx, args)


app = typer.Typer(cls=DefaultCommand, no_args_is_help=True)


@app.callback()
def validate() -> None:
    """Compare simulations with measurements."""


@app.command("case")
def validate_case(
    cases: Annotated[
        list[Path],
        typer.Argument(
            metavar="CASE…",
            help="Directories of recorded runs, or directories that contain them. "
            "Alternatively, result files of load generators (with --gpu and --server).",
        ),
    ],
    server: Annotated[
        str | None,
        typer.Option(metavar="COMMAND", help="Launch command of the measured server."),
    ] = None,
    gpu: Annotated[
        str | None, typer.Option(metavar="NAME", help="GPU of the server, such as H100 or L40S.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Model name (default: taken from --server or the result file)."
        ),
    ] = None,
    version: Annotated[
        str | None, typer.Option(metavar="RELEASE", help="Release of the engine.")
    ] = None,
    set_: Overrides = None,
    as_json: AsJson = False,
    profile: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Cost profile (JSON) for all cases (default: fitted from the calibration data "
            "of each case).",
        ),
    ] = None,
    kernel_tables: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Additional directory with kernel tables of LLMServingSim."
        ),
    ] = None,
    sensitivity: Annotated[
        bool,
        typer.Option(help="Also simulate other values of the settings that were not recorded."),
    ] = False,
    host_times: Annotated[
        bool,
        typer.Option(
            help="Also report the host time per step by kind of step. Host time is the time "
            "outside of GPU kernels."
        ),
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Write the results as CSV files to this directory."),
    ] = None,
) -> None:
    """Simulate recorded runs and compare the metrics.

    For result files of load generators (vllm bench serve, SGLang's bench_serving, guidellm, aiperf,
    genai-perf and others), the prediction needs the launch command of the server and its GPU. For
    recorded runs, step costs come from kernel tables for the model and the GPU of the case. If
    there are no such tables, simkv fits step costs to the requests of the case that ran in
    isolation, and excludes these requests from the comparison. No value is tuned to the results. If
    cases are unusable, the command lists them at the end and exits with code 2.
    """
    from simkv.validation.recorded_runs.cross_prediction import cross_predict
    from simkv.validation.recorded_runs.recorded_run import find_recorded_runs
    from simkv.validation.recorded_runs.score_tables import render_all_runs, render_run

    _check_options(out, kernel_tables)
    if any(path.is_file() for path in cases) or server is not None or gpu is not None:
        options = ScenarioOptions(gpu=gpu, model=model, version=version, from_command=server)
        _validate_benchmarks(cases, options, set_ or [], as_json=as_json)
        return
    if as_json:
        raise InputError("--json: not supported for recorded runs; use --out")
    folders = [folder for named in cases for folder in find_recorded_runs(named)]
    found = judge_cases(folders, profile, kernel_tables, varied=sensitivity)
    for scored in found.scores:
        show(*render_run(scored, found.changed[scored.case.name] if sensitivity else []))
    crossed = [] if profile else list(cross_predict(found.scores, found.costs))
    if len(found.scores) > 1:
        show(*render_all_runs(found.scores, crossed))
    above, untold = measure_host_times(found) if host_times else ([], [])
    if host_times:
        from simkv.validation.recorded_runs.score_tables import render_host_times

        show(*render_host_times(above, untold))
    if out:
        from simkv.validation.recorded_runs.score_files import write_scores

        make_folder(out)
        written = write_scores(out, found.scores, found.changed, above)
        show(f"\nWritten to {out}: {', '.join(written)}")
    for reason in found.unusable:
        print_error(reason)
    if found.unusable:
        raise typer.Exit(2)


def _validate_benchmarks(
    files: list[Path], options: ScenarioOptions, overrides: list[str], *, as_json: bool
) -> None:
    """Predict results of load generators and print the errors."""
    from simkv.validation.benchmark_check import (
        build_benchmark_scenario,
        build_other_protocols,
        check_benchmark,
    )
    from simkv.validation.benchmark_results import read_benchmarks

    found = []
    benchmarks = [one for path in files for one in read_benchmarks(path)]
    with progress("results", len(benchmarks)) as advance:
        for benchmark in benchmarks:
            scenario, built = build_benchmark_scenario(benchmark, options, overrides)
            others = build_other_protocols(benchmark, options, overrides)
            found.append(check_benchmark(benchmark, scenario, built.notes, others))
            advance()
    if as_json:
        from simkv.validation.benchmark_answers import build_validate_answer

        print_json(build_validate_answer(found))
        return
    for one in found:
        show(*_benchmark_lines(one))


def _benchmark_lines(one: CheckedBenchmark) -> Iterator[str]:
    from simkv.core.figure_registry import METRICS

    yield f"{one.benchmark.name}: {one.benchmark.requests:,} requests"
    for row in one.figures:
        metric = METRICS[row.name]
        written = metric.format_like(min(row.measured, row.predicted))
        interval = ""
        if row.interval is not None:
            mark = {True: "", False: ", outside", None: ""}[row.inside]
            interval = f"  90 % interval {row.interval.text(written, row.reason)}{mark}"
        yield (
            f"  {metric.label:<24} measured {written(row.measured):>12}  predicted "
            f"{written(row.predicted):>12}  {row.error:+7.1%}{interval}"
        )
    worst = f"Largest error: {METRICS[one.worst.name].label} {one.worst.error:+.1%}."
    outside = [f"{METRICS[row.name].label} {row.error:+.1%}" for row in one.outside]
    if outside:
        yield f"  {worst} Outside the interval: {', '.join(outside)}. Likely causes:"
    else:
        yield f"  {worst} No metric is outside its interval. Sources of error and assumptions:"
    for cause in one.causes:
        yield f"  - {cause}"


def _check_options(out: Path | None, kernel_tables: Path | None) -> None:
    if out:
        check_folder("--out", out)
    if kernel_tables and not kernel_tables.is_dir():
        raise InputError(f"--kernel-tables {kernel_tables}: there is no such directory")


@dataclass
class JudgedCases:
    """Scores, step costs and sensitivities of the simulated cases, and errors of unusable cases."""

    scores: list[Score] = field(default_factory=list)
    costs: dict[str, CostProfile] = field(default_factory=dict)
    changed: dict[str, list[SensitivityScore]] = field(default_factory=dict)
    unusable: list[InputError] = field(default_factory=list)


def judge_cases(
    folders: list[Path], profile: Path | None, kernel_tables: Path | None, *, varied: bool
) -> JudgedCases:
    """Simulate and score all usable cases.

    If there are several cases, errors of unusable cases are collected. Raises InputError if the
    only case is unusable.
    """
    from simkv.validation.recorded_runs.recorded_run import read_recorded_run
    from simkv.validation.recorded_runs.run_calibration import calibrate_run
    from simkv.validation.recorded_runs.run_scores import simulate_and_score
    from simkv.validation.recorded_runs.run_simulation import engine_of
    from simkv.validation.recorded_runs.sensitivity import score_sensitivity

    found = JudgedCases()
    with progress("cases", len(folders)) as advance:
        for folder in folders:
            try:
                case = read_recorded_run(folder)
                if case.name in found.costs:
                    raise InputError(
                        f"{case.name}: two cases have this name; give cases with different names"
                    )
                costs = calibrate_run(case, profile, kernel_tables)
                scored = simulate_and_score(case, costs, *engine_of(case))
                found.changed[case.name] = score_sensitivity(case, costs) if varied else []
                found.scores.append(scored)
                found.costs[case.name] = costs
            except InputError as error:
                if len(folders) == 1:
                    raise
                found.unusable.append(error)
            advance()
    return found


def measure_host_times(found: JudgedCases) -> tuple[list[HostTimes], list[str]]:
    """Return the host time per step of each case, and messages for cases without kernel times."""
    from simkv.validation.recorded_runs.host_gaps import host_times

    told, untold = [], []
    for scored in found.scores:
        try:
            told.append(host_times(scored.case, found.costs[scored.case.name]))
        except InputError as error:
            untold.append(str(error))
    return told, untold


@app.command("silicon")
def validate_silicon(
    rows: Annotated[
        Path,
        typer.Argument(
            metavar="ROWS.csv",
            help="Table of server configurations; columns with measured TTFT and TPOT are "
            "optional.",
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Write the predictions (points.csv) to this directory."),
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(help="Maximum number of processes (default: one per core).")
    ] = None,
) -> None:
    """Compare predictions with published measurements.

    Each row of the table is a measurement of TTFT and TPOT at one concurrency. simkv simulates the
    engine's scheduler with the request lengths and flags of the benchmark. Each client sends its
    next request when the previous one finishes. If the table has no measured columns, the command
    prints predictions only.
    """
    from simkv.validation.serving_points.measured_rows import read_rows
    from simkv.validation.serving_points.point_prediction import predict

    _check(out, jobs)
    found = read_rows(rows)
    with progress("points", None) as advance:
        predictions = predict(found, jobs=jobs, advance=advance)
    show(*_lines(found, predictions))
    if out:
        from simkv.validation.serving_points.prediction_file import write_points

        show(f"Written to {write_points(out, predictions)}")


def _check(out: Path | None, jobs: int | None) -> None:
    if out:
        check_folder("--out", out)
    if jobs is not None and jobs < 1:
        raise InputError(f"--jobs {jobs}: expected 1 or more")


def _lines(rows: list[MeasuredRow], predictions: list[Prediction]) -> Iterator[RenderableType]:
    if any(row.measured for row in rows):
        from simkv.validation.serving_points.point_scores import noise, score_groups
        from simkv.validation.serving_points.point_tables import noise_lines, score_table

        for title, group in score_groups(predictions).items():
            yield score_table(f"by {title}, in percent", group)
        yield from noise_lines(noise(rows))
    answered = sum(p.latency is not None for p in predictions)
    yield f"{answered} of {len(predictions)} rows have a prediction"
