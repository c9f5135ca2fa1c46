"""``simkv gpu validate``: validate a cost profile against runs on a device."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated

import typer

from simkv.cli.command_support import Trust, progress
from simkv.cli.gpu_options import (
    Clock,
    Device,
    KvLayout,
    Model,
    Small,
    Threads,
    WarmUp,
    device_setup,
    parse_duration,
)
from simkv.core.atomic_files import check_file, write_text
from simkv.core.errors import InputError, spelling_hint

if TYPE_CHECKING:
    from simkv.costs.cost_profile import CostProfile
    from simkv.validation.gpu_runs.load_sizing import Trial

#: Share of the time for planning and serving; the rest is for comparisons.
SERVING = 0.85
#: Duration of a plan in units of one case: two of its cases may take four units each, and setup
#: takes time as well.
CASES = 15
#: Options that apply only to recorded runs.
FOR_RECORDED = {"repeat_run": "--repeat-run", "out": "--out"}
#: Arguments that apply to both.
FOR_BOTH = {"folder", "profile", "_trusted"}


def validate(
    context: typer.Context,
    folder: Annotated[
        Path,
        typer.Argument(
            help="Directory for plan, runs and results; existing ones are reused. For a results "
            "directory of `simkv gpu run`, only that run is evaluated."
        ),
    ],
    profile: Annotated[Path, typer.Option(metavar="FILE", help="Cost profile to validate (JSON).")],
    device: Device = "cuda",
    model: Model = "llama-3-8b",
    budget: Annotated[
        str, typer.Option(metavar="TIME", help="Maximum total time, such as 9m or 90s.")
    ] = "9m",
    small: Small = False,
    repeats: Annotated[int, typer.Option(help="Maximum number of runs per case.")] = 3,
    plan_only: Annotated[
        bool, typer.Option("--plan-only", help="Write the plan and its predictions, then exit.")
    ] = False,
    case: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Run only this case of the plan; may be repeated."),
    ] = None,
    allow_other_gpu: Annotated[
        bool,
        typer.Option("--allow-other-gpu", help="Accept a profile of another GPU."),
    ] = False,
    layout: KvLayout = "block",
    warm_up: WarmUp = None,
    threads: Threads = 1,
    clock: Clock = "wall",
    seed: Annotated[int, typer.Option(help="Random seed for the workloads.")] = 0,
    repeat_run: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="For a recorded run: a second run of the same scenario, to measure noise.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="For a recorded run: write the tables as JSON."),
    ] = None,
    _trusted: Trust = False,
) -> None:
    """Validate a cost profile against runs on this device.

    Validates three levels. L0: decisions of a simulation with the measured step times. L1: step
    times. L2: figures of a simulation with predicted step times, compared with simple cost models
    and with the noise between repeated runs. The plan and its predictions are written before the
    runs. Cases are sized by the data sheet of the GPU, not by the profile. An existing plan in
    FOLDER is used. Exit 1 if a decision differs.
    """
    from simkv.costs.cost_profile import load_profile

    recorded = _is_run(folder)
    _check_options(context, folder, recorded)
    judged = load_profile(profile.name, profile.parent)
    if recorded:
        same = _judge_recorded(folder, judged, repeat_run, out)
        if not same:
            raise typer.Exit(1)
        return
    begin = perf_counter()
    from simkv.validation.gpu_runs import validation_suite
    from simkv.validation.gpu_runs.device_drift import read_sentinels
    from simkv.validation.gpu_runs.gpu_report import write_gpu_report
    from simkv.validation.gpu_runs.nominal_costs import nominal_profile
    from simkv.validation.gpu_runs.run_ranking import judge_trials
    from simkv.validation.gpu_runs.validation_plan_file import read_plan, write_plan

    budget_s = parse_duration(budget)
    if repeats < 1:
        raise InputError(f"--repeats {repeats}: expected 1 or more")
    setup = None
    if not plan_only:
        setup = device_setup(device, model, layout, True, warm_up, threads, 0, clock)
    trials = read_plan(folder, judged)
    if trials is None:
        scale = validation_suite.SMALL_SCALE if small else validation_suite.FULL_SCALE
        seconds = SERVING * budget_s / (CASES * repeats)
        trials = validation_suite.plan_trials(
            judged, scale, seconds, seed, sized_by=nominal_profile(judged)
        )
        write_plan(folder, trials, judged)
    trials = _wanted(trials, case or [])
    for trial in trials:
        size, preemptions = trial.scenario.workload.size, trial.predicted["preemptions"]
        print(
            f"{trial.name}: {size} requests, predicted {trial.predicted_s:.2f} s, "
            f"{preemptions} preemptions"
        )
    if setup is None:
        print(f"Written to {folder / 'plan'}")
        return

    from simkv.gpu.validation_plan_runner import check_device, execute_plan

    check_device(judged, setup, other_gpu=allow_other_gpu)
    with progress("requests") as advance:
        skipped = execute_plan(
            trials,
            setup,
            folder,
            lambda: SERVING * budget_s - (perf_counter() - begin),
            repeats=repeats,
            say=lambda line: print(line, flush=True),
            advance=advance,
        )
    found = judge_trials(trials, judged, folder)
    files = write_gpu_report(folder, found, judged, skipped, read_sentinels(folder))
    print((folder / "validation.md").read_text(encoding="utf-8"))
    print(f"Written to {folder}: {', '.join(path.name for path in files)}, runs/")
    if any(one.found.verdict.step is not None for one in found):
        raise typer.Exit(1)


def _is_run(folder: Path) -> bool:
    """Return whether a directory is a recorded run, complete or damaged."""
    return any((folder / name).exists() for name in ("passes.csv", "summary.json"))


def _check_options(context: typer.Context, folder: Path, recorded: bool) -> None:
    """Raise InputError for an option that has no effect on this directory."""
    for param in context.command.params:
        name = param.name or ""
        source = context.get_parameter_source(name)
        if name in FOR_BOTH or source is None or source.name != "COMMANDLINE":
            continue
        if recorded and name not in FOR_RECORDED:
            raise InputError(f"{param.opts[0]}: cannot be used with a recorded run ({folder})")
        if not recorded and name in FOR_RECORDED:
            raise InputError(
                f"{param.opts[0]}: requires a recorded run; {folder} is not a results directory of "
                "`simkv gpu run`"
            )


def _judge_recorded(
    folder: Path, profile: CostProfile, repeat_run: Path | None, out: Path | None
) -> bool:
    """Print the three levels of a recorded run; return whether all decisions are the same."""
    from simkv.validation.gpu_runs.comparison_levels import validate_run
    from simkv.validation.gpu_runs.gpu_report import render_run_tables
    from simkv.validation.gpu_runs.timed_replay import read_runs

    if out:
        check_file("--out", out)
    repeated = read_runs(repeat_run) if repeat_run else {}
    found = {
        variant: validate_run(run, profile, [repeated[variant]] if variant in repeated else [])
        for variant, run in read_runs(folder).items()
    }
    for variant, result in found.items():
        for line in render_run_tables(variant, result):
            print(line)
    if out:
        tables = {name: asdict(result) for name, result in found.items()}
        text = json.dumps(tables, indent=1, default=lambda error: error.model_dump())
        write_text(out, text + "\n")
    return all(result.verdict.step is None for result in found.values())


def _wanted(trials: list[Trial], names: list[str]) -> list[Trial]:
    """Return the trials of these names, or all if there are none. Raises InputError."""
    known = [trial.name for trial in trials]
    for name in names:
        if name not in known:
            hint = spelling_hint(name, known)
            raise InputError(
                f"--case {name}: not in the plan{hint}; expected one of {', '.join(known)}"
            )
    return [trial for trial in trials if not names or trial.name in names]
