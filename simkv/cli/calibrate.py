"""``simkv calibrate``: fit step times to measurements of one's own server."""

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
    from simkv.scenario.scenario_options import ScenarioOptions
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
            help="Results of vllm bench serve, guidellm, aiperf and others, at different loads; "
            "or forward-pass metrics.",
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="FILE",
            help="Write the scenario or the profile to this file (default: calibrated.yaml or "
            "calibrated.json).",
        ),
    ] = None,
    set_: Overrides = None,
    as_json: AsJson = False,
    **described: Any,
) -> None:
    """Fit step times to measurements of your server.

    Give two or three results at different rates, the server's launch line and its GPU. Fits a
    multiplier of decode step times, one of prefill step times, and the time of the API server to
    the mean latencies. With two or more results, each is also predicted from the others. The
    scenario that is written has the load of the last result; run, sweep or plan with it.

    Forward-pass metrics contain the duration and the batch of each step. They are fitted without a
    simulation, and a cost profile is written for the field profile of a scenario. One step in four
    is held out to state the error.
    """
    from simkv.incident.forward_passes import is_forward_passes

    steps = [path for path in files if is_forward_passes(path)]
    if steps:
        if len(steps) < len(files):
            other = next(path for path in files if path not in steps)
            raise InputError(f"{other}: not forward-pass metrics like {steps[0]}; use one kind")
        _fit_steps(steps, out or Path("calibrated.json"), options_of(described), set_, as_json)
        return
    out = out or Path("calibrated.yaml")
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


def _fit_steps(
    files: list[Path], out: Path, options: ScenarioOptions, set_: list[str] | None, as_json: bool
) -> None:
    """Fit a cost profile to forward-pass metrics and write it."""
    import pandas as pd

    from simkv.incident.forward_passes import fit_forward_passes, read_forward_passes
    from simkv.report.json_answers import CalibrateAnswer, HeldOutStepsAnswer
    from simkv.scenario.launch_line import read_launch_line
    from simkv.schedulers.engine_registry import DEFAULT

    check_file("--out", out)
    if set_:
        raise InputError("--set: does not apply to forward-pass metrics; set it in the scenario")
    line = read_launch_line(options.from_command) if options.from_command else None
    steps = pd.concat([read_forward_passes(path) for path in files], ignore_index=True)
    profile = fit_forward_passes(
        steps,
        engine=f"{options.engine or DEFAULT.name} {options.version or ''}".strip(),
        model=options.model or (line.model if line else None) or "unknown",
        gpu=options.gpu or "unknown",
    )
    write_text(out, profile.model_dump_json(indent=1, exclude_none=True) + "\n")
    if as_json:
        errors = {
            kind: HeldOutStepsAnswer(**error.model_dump())
            for kind, error in profile.fit.held_out.items()
        }
        print_json(CalibrateAnswer(steps=len(steps), held_out=errors, written=str(out)))
        return
    show(f"Fitted to {len(steps):,} steps. Errors of steps that were not fitted:")
    for kind, error in profile.fit.held_out.items():
        show(
            f"  {kind}: {error.points} steps, median {error.median:.1%}, "
            f"95 % within {error.p95:.1%}, mean {error.bias:+.1%}"
        )
    show(f"Written to {out}; for example: simkv run SCENARIO --set profile={out}")


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
