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
    KvTokens,
    Model,
    Threads,
    WarmUp,
    device_setup,
    parse_duration,
)
from simkv.core.atomic_files import check_file, write_text
from simkv.core.errors import InputError, spelling_hint

if TYPE_CHECKING:
    from simkv.validation.gpu_runs.load_sizing import Trial
    from simkv.validation.gpu_runs.validation_plan_file import Plan

#: Options that apply only to recorded runs.
FOR_RECORDED = {"repeat_run": "--repeat-run", "out": "--out"}
#: Arguments that apply to plans and to recorded runs.
FOR_BOTH = {"folder", "profile", "_trusted"}
#: Assumed start-up time before the first run on a CPU, in seconds.
CPU_START_S = 10.0


def validate(
    context: typer.Context,
    folder: Annotated[
        Path,
        typer.Argument(
            help="Directory for the plan, the runs and the results; existing files are reused. "
            "If this is a results directory of `simkv gpu run`, only that run is evaluated."
        ),
    ],
    profile: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="Cost profile to validate (JSON), or a directory written by `simkv gpu "
            "calibrate` (default: the profiles of the plan in FOLDER).",
        ),
    ] = None,
    device: Device = "cuda",
    model: Model = None,
    budget: Annotated[
        str, typer.Option(metavar="TIME", help="Total duration of the runs, such as 9m or 90s.")
    ] = "9m",
    kv_tokens: KvTokens = None,
    repeats: Annotated[
        int,
        typer.Option(
            help="Number of runs of one case with the same seed, to measure the variation between "
            "equal runs."
        ),
    ] = 2,
    plan_only: Annotated[
        bool,
        typer.Option(
            "--plan-only", help="Write the plan and its predictions, and exit without runs."
        ),
    ] = False,
    serve_only: Annotated[
        bool,
        typer.Option(
            "--serve-only",
            help="Run the trials without an evaluation. A later call with --evaluate-only "
            "evaluates them on any machine.",
        ),
    ] = False,
    evaluate_only: Annotated[
        bool,
        typer.Option(
            "--evaluate-only",
            help="Evaluate the recorded runs, on any machine, even if some trials of the plan "
            "were not run.",
        ),
    ] = False,
    case: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Run only this trial of the plan; may be repeated."),
    ] = None,
    allow_other_gpu: Annotated[
        bool,
        typer.Option(
            "--allow-other-gpu", help="Accept a profile that was measured on another GPU."
        ),
    ] = False,
    warm_up: WarmUp = None,
    threads: Threads = 1,
    clock: Clock = "wall",
    seed: Annotated[
        int, typer.Option(help="First random seed; each case runs with this seed and the next one.")
    ] = 0,
    repeat_run: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="For a recorded run: results directory of a second run of the same scenario, "
            "to measure the variation between equal runs.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="For a recorded run: write the tables as JSON."),
    ] = None,
    _trusted: Trust = False,
) -> None:
    """Validate a cost profile against runs on this device.

    The validation has three levels. L0: decisions of a simulation with the measured step times. L1:
    step times. L2: metrics of a simulation with predicted step times, compared with other cost
    models and with the differences between repeated runs. The command first writes the plan of the
    runs, with their predicted duration and results. The load of the runs follows from the data
    sheet of the GPU, not from the profile. If FOLDER contains a plan, this plan is used; if all of
    its runs are recorded, they are evaluated without a device. Exit 1 if a decision differs.
    """
    recorded = _is_run(folder)
    _check_options(context, folder, recorded)
    if recorded:
        if profile is None:
            raise InputError("--profile: missing; required to evaluate a recorded run")
        if not _judge_recorded(folder, profile, repeat_run, out):
            raise typer.Exit(1)
        return
    begin = perf_counter()
    budget_s = parse_duration(budget)
    _check_stages(
        {"--plan-only": plan_only, "--serve-only": serve_only, "--evaluate-only": evaluate_only}
    )
    if repeats < 1:
        raise InputError(f"--repeats {repeats}: expected 1 or more")
    plan = _find_plan(folder, profile, budget_s, seed, kv_tokens, on_cpu=device == "cpu")
    main = next(iter(plan.profiles.values()))
    if model not in (None, main.model):
        raise InputError(f"--model {model}: the profile was measured with model {main.model}")
    trials = _wanted(plan.trials, case or [])
    _print_plan(trials, on_cpu=device == "cpu")
    if plan_only:
        print(f"Written to {folder / 'plan'}")
        return
    missing = _find_missing(folder, trials, repeats, evaluate_only=evaluate_only)
    if missing and not evaluate_only:
        from simkv.gpu.validation_plan_runner import check_device, execute_plan

        setup = device_setup(device, main.model, True, warm_up, threads, 0, clock)
        check_device(main, setup, other_gpu=allow_other_gpu)
        with progress("requests") as advance:
            missing = execute_plan(
                trials,
                setup,
                folder,
                lambda: budget_s - (perf_counter() - begin),
                repeats=repeats,
                say=lambda line: print(line, flush=True),
                advance=advance,
            )
    if serve_only:
        print(f"To evaluate on any machine: simkv gpu validate {folder} --evaluate-only")
        return
    if not _judge(folder, plan, trials, missing):
        raise typer.Exit(1)


def _check_stages(chosen: dict[str, bool]) -> None:
    """Raise InputError if more than one of these options is given."""
    given = [name for name, on in chosen.items() if on]
    if len(given) > 1:
        raise InputError(f"{given[1]}: cannot be combined with {given[0]}")


def _find_plan(
    folder: Path,
    path: Path | None,
    budget_s: float,
    seed: int,
    kv_tokens: int | None,
    *,
    on_cpu: bool,
) -> Plan:
    """Return the plan in ``folder``; if there is none, make a plan and write it."""
    from simkv.validation.gpu_runs.load_sizing import scale_of
    from simkv.validation.gpu_runs.nominal_costs import nominal_profile
    from simkv.validation.gpu_runs.validation_plan_file import (
        Plan,
        read_campaign_training,
        read_plan,
        read_profiles,
        write_plan,
    )
    from simkv.validation.gpu_runs.validation_suite import START_S, plan_trials

    profiles, campaign = read_profiles(path) if path else ({}, folder)
    plan = read_plan(folder, profiles)
    if plan is not None:
        return plan
    if not profiles:
        raise InputError(f"--profile: missing; required because {folder} does not contain a plan")
    main = next(iter(profiles.values()))
    trials = plan_trials(
        profiles,
        scale_of(main, kv_tokens),
        budget_s,
        seed,
        sized_by=nominal_profile(main, campaign),
        start_s=CPU_START_S if on_cpu else START_S,
    )
    plan = Plan(trials, profiles, read_campaign_training(profiles, campaign))
    write_plan(folder, plan)
    return plan


def _find_missing(
    folder: Path, trials: list[Trial], repeats: int, *, evaluate_only: bool
) -> list[str]:
    """Return the names of the runs that are not recorded.

    Raises InputError with ``evaluate_only`` if no run is recorded.
    """
    from simkv.validation.gpu_runs.validation_suite import order_trial_runs

    runs = [run.name for run in order_trial_runs(trials, repeats)]
    missing = [name for name in runs if not (folder / "runs" / name).exists()]
    if evaluate_only and len(missing) == len(runs):
        raise InputError(f"--evaluate-only: {folder / 'runs'} contains no runs of this plan")
    return missing


def _print_plan(trials: list[Trial], *, on_cpu: bool) -> None:
    """Print each trial with its load, and the predicted total duration."""
    from simkv.validation.gpu_runs.validation_suite import START_S, predicted_duration

    print(f"{'trial':<30}{'requests':>9}{'rows':>7}{'most':>6}{'KV tokens':>11}{'seconds':>9}")
    for trial in trials:
        p = trial.predicted
        print(
            f"{trial.name:<30}{p['requests']:>9}{p['rows_mean']:>7.1f}{p['rows_peak']:>6}"
            f"{p['kv_tokens_peak']:>11}{trial.predicted_s:>9.1f}"
            + (f"   {p['preemptions']} preemptions" if p["preemptions"] else "")
            + (f"   outside the range: {', '.join(p['outside'])}" if p["outside"] else "")
        )
    minutes = predicted_duration(trials, CPU_START_S if on_cpu else START_S) / 60
    print(f"Predicted duration: {minutes:.1f} minutes")


def _judge(folder: Path, plan: Plan, trials: list[Trial], skipped: list[str]) -> bool:
    """Evaluate all runs and write the report; return whether all decisions agree."""
    from simkv.validation.gpu_runs.device_drift import read_sentinels
    from simkv.validation.gpu_runs.gpu_report import write_gpu_report
    from simkv.validation.gpu_runs.run_ranking import judge_trials

    found = judge_trials(trials, plan, folder)
    files = write_gpu_report(folder, found, plan.profiles, skipped, read_sentinels(folder))
    print((folder / "validation.md").read_text(encoding="utf-8"))
    print(f"Written to {folder}: {', '.join(path.name for path in files)}, runs/")
    return all(one.found.verdict.step is None for one in found)


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


def _judge_recorded(folder: Path, path: Path, repeat_run: Path | None, out: Path | None) -> bool:
    """Print the evaluation of a recorded run; return whether all decisions agree."""
    from simkv.validation.gpu_runs.baseline_models import fit_baselines, read_training
    from simkv.validation.gpu_runs.comparison_levels import validate_run
    from simkv.validation.gpu_runs.gpu_report import render_run_tables
    from simkv.validation.gpu_runs.timed_replay import read_runs
    from simkv.validation.gpu_runs.validation_plan_file import read_profiles

    if out:
        check_file("--out", out)
    profiles, campaign = read_profiles(path)
    profile = next(iter(profiles.values()))
    baselines = fit_baselines(read_training(campaign, profile), profile)
    repeated = read_runs(repeat_run) if repeat_run else {}
    found = {
        name: validate_run(run, profile, [repeated[name]] if name in repeated else [], baselines)
        for name, run in read_runs(folder).items()
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
    """Return the trials with these names, or all trials if ``names`` is empty.

    Raises InputError for a name that is not in the plan.
    """
    known = [trial.name for trial in trials]
    for name in names:
        if name not in known:
            hint = spelling_hint(name, known)
            raise InputError(
                f"--case {name}: not in the plan{hint}; expected one of {', '.join(known)}"
            )
    return [trial for trial in trials if not names or trial.name in names]
