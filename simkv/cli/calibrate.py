"""``simkv calibrate``: fit step times to benchmarks of one's own server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from simkv.cli.command_support import AsJson, Overrides, print_json, progress, show
from simkv.cli.scenario_flags import add_scenario_flags, options_of
from simkv.core.atomic_files import check_file, write_text
from simkv.core.errors import InputError

if TYPE_CHECKING:
    from simkv.validation.benchmark_check import Calibration, CalibrationCase, ComparedFigure

#: Options that describe a load, which the results state.
LOAD_OPTIONS = (
    *("load", "trace", "request_rate", "burstiness", "max_concurrency", "num_prompts"),
    *("input_len", "output_len", "range_ratio", "prefix_len", "seed", "growth", "peak"),
)


def calibrate(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE…",
            help="Results of vllm bench serve, guidellm, aiperf and others, at different loads.",
        ),
    ],
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="FILE", help="Write the scenario to this file.")
    ] = Path("calibrated.yaml"),
    set_: Overrides = None,
    as_json: AsJson = False,
    **described: Any,
) -> None:
    """Fit step times to benchmarks of your server.

    Give two or three results at different rates, the server's launch line and its GPU. Fits a
    multiplier of decode step times, one of prefill step times, and the time of the API server to
    the mean latencies. With two or more results, each is also predicted from the others. The
    scenario that is written has the load of the last result; run, sweep or plan with it.
    """
    from simkv.validation.benchmark_check import (
        CalibrationCase,
        build_benchmark_scenario,
        fit_calibration,
        leave_one_out,
        predict_figures,
    )
    from simkv.validation.benchmark_results import read_benchmark

    check_file("--out", out)
    cases = []
    for path in files:
        benchmark = read_benchmark(path)
        scenario, _ = build_benchmark_scenario(benchmark, options_of(described), set_ or [])
        cases.append(CalibrationCase(benchmark, scenario))
    with progress("simulations", None) as advance:
        fitted = fit_calibration(cases, advance)
        excluded = leave_one_out(cases, advance)
        explained = [(case, predict_figures(case, fitted)) for case in cases]
    _write(out, cases[-1], fitted)
    if as_json:
        from simkv.validation.benchmark_answers import build_calibrate_answer

        print_json(build_calibrate_answer(fitted, explained, excluded, out))
        return
    show(
        f"Decode steps x{fitted.decode:.3f}, prefill steps x{fitted.prefill:.3f}, API server "
        f"{1e3 * fitted.request_s:.2f} ms per request and {1e3 * fitted.latency_s:.1f} ms latency.",
        *_table("Fitted to all results:", explained),
        *_table("Predicted without the result itself:", excluded),
    )
    if not excluded:
        show("With a second result at another rate, the error of a prediction could be stated.")
    show(f"Written to {out}; for example: simkv run {out}")


def _table(title: str, rows: list[tuple[CalibrationCase, list[ComparedFigure]]]) -> Iterator[str]:
    from simkv.core.figure_registry import METRICS

    if rows:
        yield title
    for case, figures in rows:
        parts = []
        for one in figures:
            metric = METRICS[one.name]
            parts.append(f"{metric.label} {metric.format(one.predicted)} ({one.error:+.1%})")
        yield f"  {case.benchmark.path.name}: {', '.join(parts)}"


def _write(out: Path, case: CalibrationCase, fitted: Calibration) -> None:
    """Write the calibrated scenario. Raises InputError if the folder does not exist."""
    from simkv.scenario.scenario_writer import to_yaml

    if not out.parent.is_dir():
        raise InputError(f"--out {out}: directory {out.parent} does not exist")
    write_text(out, to_yaml({"run": fitted.apply(case.scenario)}))


add_scenario_flags(calibrate, without=LOAD_OPTIONS)
