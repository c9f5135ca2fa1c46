"""``simkv calibrate``: fit step times to measurements of one's own server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from simkv.cli.command_support import (
    AsJson,
    Overrides,
    print_error,
    print_json,
    progress,
    show,
)
from simkv.cli.scenario_flags import add_scenario_flags, options_of
from simkv.core.atomic_files import check_file, write_text
from simkv.core.errors import InputError

if TYPE_CHECKING:
    from simkv.costs.cost_profile import CostProfile
    from simkv.scenario.scenario_options import ScenarioOptions
    from simkv.validation.benchmark_check import Calibration, CalibrationCase, ComparedFigure

#: Options that describe a load, which the results state, or a whole benchmark.
LOAD_OPTIONS = (
    *("recipe", "load", "trace", "request_rate", "burstiness", "max_concurrency", "num_prompts"),
    *("input_len", "output_len", "range_ratio", "prefix_len", "seed", "growth", "peak"),
)


def calibrate(
    files: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="FILE…",
            help="Result files of a load generator (vllm bench serve, guidellm, aiperf and "
            "others) at different loads, or files with forward-pass metrics.",
        ),
    ] = None,
    log: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="Server log; may be repeated."),
    ] = None,
    otel: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE", help="File with OpenTelemetry spans of the server; may be repeated."
        ),
    ] = None,
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

    From results of a load generator: give two or three results at different request rates, the
    launch command of the server, and the name of its GPU. simkv fits three numbers to the mean
    latencies: a factor for decode steps, a factor for prefill steps, and the time of the API
    server. With two or more results, simkv also predicts each result from a fit to the other
    results. The command writes a scenario with the load of the last result. Use this scenario with
    run, sweep or plan.

    From forward-pass metrics, which contain the duration and the batch of each step: simkv fits
    step times directly and writes a cost profile. Set the field profile of a scenario to this file.
    One step in four is held out from the fit, to measure the error.

    From a server log or spans (--log, --otel): simkv rebuilds and simulates the run of the server
    as diagnose does, and fits a cost profile to the times of its requests. You can also give the
    results of the load generator for the same run. One request in four is held out from the fit.
    """
    from simkv.incident.forward_passes import is_forward_passes

    files = files or []
    if log or otel:
        inputs = [*(log or []), *(otel or []), *files]
        _fit_log(inputs, out or Path("calibrated.json"), options_of(described), set_, as_json)
        return
    if not files:
        raise InputError("FILE: missing; give results of a load generator, --log or --otel")
    steps = [path for path in files if is_forward_passes(path)]
    if steps:
        if len(steps) < len(files):
            other = next(path for path in files if path not in steps)
            raise InputError(
                f"{other}: contains no forward-pass metrics, but {steps[0]} does; expected files "
                f"of one kind"
            )
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
    from simkv.validation.benchmark_results import read_benchmarks

    check_file("--out", out)
    cases = []
    for benchmark in (one for path in files for one in read_benchmarks(path)):
        scenario, _ = build_benchmark_scenario(benchmark, options_of(described), set_ or [])
        cases.append(CalibrationCase(benchmark, scenario))
    with progress("simulations", None) as advance:
        fitted = fit_calibration(cases, advance)
        excluded = leave_one_out(cases, advance)
        explained = [(case, predict_figures(case, fitted)) for case in cases]
    _write(out, cases[-1], fitted, _describe_errors(excluded or explained, bool(excluded)))
    if as_json:
        from simkv.validation.benchmark_answers import build_calibrate_answer

        print_json(build_calibrate_answer(fitted, explained, excluded, out))
        return
    show(
        f"Decode steps x{fitted.decode:.3f}, prefill steps x{fitted.prefill:.3f}, API server "
        f"{1e3 * fitted.request_s:.2f} ms per request and {1e3 * fitted.latency_s:.1f} ms latency.",
        *_table("Errors of the fit to all results:", explained),
        *_table("Errors of predictions, each fitted to the other results only:", excluded),
    )
    if not excluded:
        show("To measure the error of predictions, give a second result at another request rate.")
    show(f"Written to {out}; for example: simkv run {out}")


def _fit_steps(
    files: list[Path], out: Path, options: ScenarioOptions, set_: list[str] | None, as_json: bool
) -> None:
    """Fit a cost profile to forward-pass metrics and write it."""
    import pandas as pd

    from simkv.incident.forward_passes import fit_forward_passes, read_forward_passes
    from simkv.scenario.launch_line import read_launch_line
    from simkv.schedulers.engine_registry import DEFAULT

    check_file("--out", out)
    if set_:
        raise InputError(
            "--set: not supported with forward-pass metrics; set the field in the scenario"
        )
    line = read_launch_line(options.from_command) if options.from_command else None
    steps = pd.concat([read_forward_passes(path) for path in files], ignore_index=True)
    profile = fit_forward_passes(
        steps,
        engine=f"{options.engine or DEFAULT.name} {options.version or ''}".strip(),
        model=options.model or (line.model if line else None) or "unknown",
        gpu=options.gpu or "unknown",
    )
    _write_profile(profile, out, f"{len(steps):,} steps", "steps", as_json, steps=len(steps))


def _fit_log(
    inputs: list[Path], out: Path, options: ScenarioOptions, set_: list[str] | None, as_json: bool
) -> None:
    """Fit a cost profile to the log and the spans of a server and write it."""
    from simkv.cli.diagnose import parse_engine_overrides
    from simkv.incident.diagnose_stages import fit_profile
    from simkv.incident.server_setup import UserSettings
    from simkv.scenario.launch_line import read_launch_line

    check_file("--out", out)
    line = read_launch_line(options.from_command) if options.from_command else None
    fields = dict(line.fields) if line else {}
    engine = {
        path.removeprefix("engine."): value
        for path, value in fields.items()
        if path.startswith("engine.")
    }
    asked = UserSettings(
        options.engine or (line.engine if line else None),
        options.version or (line.version if line else None),
        options.gpu,
        options.model or (line.model if line else None),
        options.tp or fields.get("hardware.tp"),
        options.dp or fields.get("hardware.dp"),
        engine | parse_engine_overrides(set_ or []),
    )
    with progress("simulations") as advance:
        profile, sampled = fit_profile(inputs, asked, lambda done, total: advance(done, total))
    _write_profile(profile, out, profile.source[0], "requests or steps", as_json)
    if sampled:
        print_error(
            "note: the inputs contain no data on single requests. simkv fitted step times to "
            "requests that it sampled from the log lines, so these errors do not apply to the "
            "real requests. Add --otel or results of a load generator"
        )


def _write_profile(
    profile: CostProfile, out: Path, fitted: str, unit: str, as_json: bool, steps: int | None = None
) -> None:
    """Write a fitted profile and print its errors on held-out data.

    ``fitted`` describes the data. ``unit`` is the plural noun for the held-out items, such as
    steps.
    """
    from simkv.report.json_answers import CalibrateAnswer, HeldOutStepsAnswer

    write_text(out, profile.model_dump_json(indent=1, exclude_none=True) + "\n")
    errors = profile.fit.held_out
    if as_json:
        held_out = {kind: HeldOutStepsAnswer(**one.model_dump()) for kind, one in errors.items()}
        print_json(CalibrateAnswer(steps=steps, held_out=held_out, written=str(out)))
        return
    show(f"Fitted to {fitted}. Errors of {unit} that were held out from the fit:")
    for kind, error in errors.items():
        show(
            f"  {kind}: {error.points} {unit}, median {error.median:.1%}, "
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
        yield f"  {case.benchmark.short_name}: {', '.join(parts)}"


def _describe_errors(rows: list[tuple[CalibrationCase, list[ComparedFigure]]], held: bool) -> str:
    """Return a phrase with the largest error of the mean latencies.

    ``held`` says whether the results were left out of the fit.
    """
    largest = max((abs(one.error) for _, figures in rows for one in figures), default=0.0)
    which = "results left out of the fit" if held else "the fitted result"
    return f"mean latencies of {which} within {100 * largest:.1f} %"


def _write(out: Path, case: CalibrationCase, fitted: Calibration, errors: str) -> None:
    """Write the calibrated scenario. Raises InputError if the folder does not exist.

    ``errors`` describes the errors of the calibration.
    """
    from simkv.scenario.scenario_writer import to_yaml

    if not out.parent.is_dir():
        raise InputError(f"--out {out}: directory {out.parent} does not exist")
    scenario = fitted.apply(case.scenario)
    sources = scenario.provenance.model_copy(update={"calibration": errors})
    write_text(out, to_yaml({"run": scenario.model_copy(update={"provenance": sources})}))


add_scenario_flags(calibrate, without=LOAD_OPTIONS)
