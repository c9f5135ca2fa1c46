"""``simkv validate gpu``: parse, call, print."""

from __future__ import annotations

from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated

import typer

from simkv.cli.common import Trust, progress
from simkv.cli.lab import (
    Clock,
    Device,
    Model,
    PoolLayout,
    ProfileFile,
    Small,
    Threads,
    WarmUp,
    device_setup,
    seconds_of,
)
from simkv.core.errors import InputError, nearest

if TYPE_CHECKING:
    from simkv.proof.validation.served.sizing import Trial

#: Share of the time for planning and serving; the rest is for comparing.
SERVING = 0.85
#: Cases of a plan; two of them may take four times as long, and there is a start.
CASES = 15


def validate_gpu(
    out: Annotated[Path, typer.Argument(help="Folder of the results; goes on if it has begun.")],
    profile: ProfileFile,
    device: Device = "cuda",
    model: Model = "llama-3-8b",
    budget: Annotated[str, typer.Option(help="Time for all of it, such as 9m or 90s.")] = "9m",
    small: Small = False,
    repeats: Annotated[int, typer.Option(help="Times that each case is served at most.")] = 3,
    only_plan: Annotated[
        bool, typer.Option("--only-plan", help="Write the plan and its predictions; serve nothing.")
    ] = False,
    case: Annotated[
        list[str] | None, typer.Option(help="Serve only these cases; may be repeated.")
    ] = None,
    other_gpu: Annotated[
        bool, typer.Option("--other-gpu", help="Judge a profile of another device than this one.")
    ] = False,
    layout: PoolLayout = "block",
    warm_up: WarmUp = None,
    threads: Threads = 1,
    clock: Clock = "wall",
    seed: Annotated[int, typer.Option(help="Seed of the workloads.")] = 0,
    _trusted: Trust = False,
) -> None:
    """Serve a set of scenarios for real and judge a profile by them, at three levels.

    L0: fed the measured times, the simulation makes the same decisions. L1: predicted against
    measured step times. L2: a free simulation against the run, beside plain cost models and the
    noise of serving it again. The plan and its predictions are written before anything is served,
    its cases sized by the data sheet and not by the profile; if OUT has a plan already, that is
    used. Exit 1 if a decision differs.
    """
    begin = perf_counter()
    from simkv.costs.profile import load_profile
    from simkv.proof.validation.served import suite
    from simkv.proof.validation.served.drift import read_sentinels
    from simkv.proof.validation.served.judge import judge
    from simkv.proof.validation.served.nominal import nominal
    from simkv.proof.validation.served.page import write
    from simkv.proof.validation.served.plan import read_plan, write_plan

    budget_s = seconds_of(budget)
    judged_profile = load_profile(profile.name, profile.parent)
    if repeats < 1:
        raise InputError(f"--repeats {repeats}: expected 1 or more")
    setup = None
    if not only_plan:
        setup = device_setup(device, model, layout, True, warm_up, threads, 0, clock)
    trials = read_plan(out, judged_profile)
    if trials is None:
        scale = suite.SMALL if small else suite.FULL
        seconds = SERVING * budget_s / (CASES * repeats)
        sized_by = nominal(judged_profile)
        trials = suite.plan(judged_profile, scale, seconds, seed, sized_by=sized_by)
        write_plan(out, trials, judged_profile)
    trials = _wanted(trials, case or [])
    for trial in trials:
        size, preemptions = trial.scenario.workload.size, trial.predicted["preemptions"]
        print(
            f"{trial.name}: {size} requests, predicted {trial.predicted_s:.2f} s, "
            f"{preemptions} preemptions"
        )
    if setup is None:
        print(f"Written to {out / 'plan'}")
        return

    from simkv.lab.trials import check_device, serve_cases

    check_device(judged_profile, setup, other_gpu=other_gpu)
    with progress("requests") as advance:
        skipped = serve_cases(
            trials,
            setup,
            out,
            lambda: SERVING * budget_s - (perf_counter() - begin),
            repeats=repeats,
            say=lambda line: print(line, flush=True),
            advance=advance,
        )
    found = judge(trials, judged_profile, out)
    files = write(out, found, judged_profile, skipped, read_sentinels(out))
    print((out / "validation.md").read_text(encoding="utf-8"))
    print(f"Written to {out}: {', '.join(path.name for path in files)}, runs/")
    if any(one.found.verdict.step is not None for one in found):
        raise typer.Exit(1)


def _wanted(trials: list[Trial], names: list[str]) -> list[Trial]:
    """The trials of these names, all if there is none. Raises InputError."""
    known = [trial.name for trial in trials]
    for name in names:
        if name not in known:
            hint = nearest(name, known)
            raise InputError(f"--case {name}: is not in the plan{hint}; {', '.join(known)}")
    return [trial for trial in trials if not names or trial.name in names]
