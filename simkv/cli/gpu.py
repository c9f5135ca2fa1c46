"""``simkv gpu``: run scenarios on a device, and calibrate and validate cost profiles there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from simkv.cli.command_support import (
    Overrides,
    ScenarioArgument,
    Trust,
    check_variant,
    progress,
)
from simkv.cli.gpu_options import (
    Clock,
    Device,
    KvTokens,
    Model,
    Repeats,
    RunFolder,
    Small,
    Threads,
    WarmUp,
    device_setup,
    parse_duration,
)
from simkv.cli.gpu_validate import validate
from simkv.cli.usage_errors import Commands
from simkv.core.atomic_files import check_file, check_folder, write_text

if TYPE_CHECKING:
    from simkv.gpu.execution_record import ExecutionRecord

#: Line printed if there are no composed costs to compare with.
NOT_COMPOSED = (
    "simkv has no operator data for this GPU or model, so there are no computed step times to "
    "compare with."
)

app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    help="Measure step times and run engines on a GPU or CPU.",
)


@app.command()
def run(
    scenario: ScenarioArgument,
    device: Device = "cuda",
    model: Model = None,
    variant: Annotated[
        list[str] | None, typer.Option(help="Run only this variant; may be repeated.")
    ] = None,
    set_: Overrides = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Write results to this directory (default: runs/gpu-<scenario>/)."),
    ] = None,
    graphs: Annotated[bool, typer.Option(help="Capture CUDA graphs.")] = True,
    warm_up: WarmUp = None,
    threads: Threads = 1,
    seed: Annotated[int, typer.Option(help="Random seed for the weights.")] = 0,
    _trusted: Trust = False,
) -> None:
    """Run a scenario on this device in real time.

    The command writes the times of all requests and steps, and then simulates the scenario with the
    measured step times. Exit 1 if a scheduling decision differs between the real run and the
    simulation.
    """
    from simkv.report.run_files import check_run_folder
    from simkv.scenario.packaged_scenarios import find_scenario
    from simkv.scenario.scenario_loader import load

    setup = device_setup(device, model, graphs, warm_up, threads, seed)
    path = find_scenario(scenario)
    variants = load(path, set_ or [])
    for name in variant or []:
        check_variant(name, variants)
    chosen = {k: v for k, v in variants.items() if not variant or k in variant}
    folder = out or Path("runs") / f"gpu-{next(iter(chosen.values())).name}"
    check_run_folder(folder)

    from simkv.gpu.execution_record import write_executions
    from simkv.gpu.scenario_execution import ScenarioExecution
    from simkv.validation.gpu_runs.timed_replay import check_agreement

    runs, same = {}, True
    for name, loaded in chosen.items():
        runs[name] = found = ScenarioExecution(loaded, setup).serve()
        different = check_agreement(found.scenario, found.passes, found.recorder).step
        print(_report(name, found, different))
        same &= different is None
    written = write_executions(folder, runs, setup)
    print(f"Written to {folder}: {', '.join(written)}")
    if not same:
        raise typer.Exit(1)


@app.command()
def replay(
    folder: RunFolder,
    _trusted: Trust = False,
) -> None:
    """Simulate a recorded run with its measured step times.

    Exit 1 if a decision differs.
    """
    from simkv.validation.gpu_runs.timed_replay import read_runs

    different = False
    for variant, run in read_runs(folder).items():
        verdict = run.verdict
        if verdict.step is None:
            print(f"{variant}: ok ({verdict.decisions} decisions)")
            continue
        different = True
        print(f"{variant}: differs at decision {verdict.step}")
        print(f"  recorded: {verdict.recorded}")
        print(f"  replayed: {verdict.replayed}")
    if different:
        raise typer.Exit(1)


@app.command()
def bench(
    device: Device = "cuda",
    model: Model = None,
    small: Small = False,
    kv_tokens: KvTokens = None,
    repeats: Repeats = 20,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the results to this file as JSON.")
    ] = None,
    warm_up: WarmUp = None,
    threads: Threads = 1,
) -> None:
    """Benchmark attention kernels and whole steps.

    The output compares the measured rates with the peak rates of the device and with PyTorch's own
    attention.
    """
    setup = device_setup(device, model, True, warm_up, threads, 0)
    if out:
        check_file("--out", out)
    from simkv.gpu.device_memory import fit_limits
    from simkv.gpu.kernel_benchmark import SIZES, SMALL_SIZES, sizes_for
    from simkv.gpu.kernel_benchmark import bench as measured

    limits = SMALL_SIZES if small else SIZES
    sizes = sizes_for(fit_limits(setup, limits, kv_tokens).kv_tokens, limits)
    found = []
    for row in measured(setup.shape, sizes, setup.device, repeats=repeats, warm_up=setup.warm_up):
        print(row, flush=True)
        found.append(row._asdict())
        if out:
            write_text(out, json.dumps(found, indent=1) + "\n")


@app.command()
def calibrate(
    out: Annotated[
        Path,
        typer.Argument(help="Directory for the measurements; existing measurements are reused."),
    ],
    device: Device = "cuda",
    model: Model = None,
    budget: Annotated[
        str, typer.Option(metavar="TIME", help="Maximum measuring time, such as 8m or 90s.")
    ] = "8m",
    small: Small = False,
    kv_tokens: KvTokens = None,
    repeats: Repeats = 20,
    warm_up: WarmUp = None,
    threads: Threads = 1,
    clock: Clock = "wall",
) -> None:
    """Measure step times on this device and fit a cost profile.

    The output shows the error of the profile on steps that were held out from the fit. It also
    compares the measured step times with the step times that simkv computes from public operator
    tables. Scenarios with a `hardware` section use these computed step times.
    """
    check_folder("OUT", out)
    setup = device_setup(device, model, True, warm_up, threads, 0, clock)
    budget_s = parse_duration(budget)
    from simkv.gpu import gpu_calibration as campaign
    from simkv.gpu.campaign_plan import SMALL_LIMITS, Limits
    from simkv.gpu.device_memory import fit_limits
    from simkv.validation.gpu_runs.comparison_levels import measured_over_composed

    limits = fit_limits(setup, SMALL_LIMITS if small else Limits(), kv_tokens)
    with progress("measurements") as advance:
        profile, samples, judged = campaign.calibrate(
            setup, limits, out, budget_s, repeats=repeats, progress=advance
        )
    print(f"{setup.shape.name} with {limits.kv_tokens} tokens of KV on {profile.gpu}")
    print(f"{len(samples)} measurements; {profile.source[-1]}")
    for what, value in campaign.achieved_rates(samples, setup.shape, setup.itemsize).items():
        print(f"{what}: {value}")
    print("Error on held-out steps of real runs (median, P95, bias):")
    for kind, error in profile.fit.held_out.items():
        shares = [100 * x for x in (error.median, error.p95, error.bias)]
        print(f"  {kind:<8}{shares[0]:6.1f} % {shares[1]:6.1f} % {shares[2]:+6.1f} %", end="")
        print(f"  of {error.points} steps")
    steps = [(step.load, step.seconds) for step in judged]
    ratios = measured_over_composed(steps, profile.gpu, profile.model)
    print(
        "Measured step time divided by computed step time (median, P10 to P90):"
        if ratios
        else NOT_COMPOSED
    )
    for kind, (low, middle, high) in ratios.items():
        print(f"  {kind:<8}{middle:6.2f}   {low:.2f} to {high:.2f}")
    print(f"Written to {out}: {', '.join(sorted(p.name for p in out.iterdir()))}")


app.command()(validate)
app.command("serve", help="Run a scenario on this device in real time; same as `gpu run`.")(run)


def _report(name: str, run: ExecutionRecord, different: int | None) -> str:
    """Return text with the main metrics of a run and the first step that differs from the
    simulation with the measured step times, if any.
    """
    found = run.summary
    ttft, tpot = found["ttft_ms"], found["tpot_ms"]
    decisions = f"{len(run.recorder.lines)} decisions"
    return (
        f"{name}: {found['finished']} of {found['requests']} finished in "
        f"{found['makespan_s']:.3f} s, {found['preemptions']} preemptions, "
        f"{found['output_throughput']:.1f} output tok/s\n"
        f"  TTFT mean {ttft['mean']:.2f} ms, P99 {ttft['p99']:.2f} ms; "
        f"TPOT mean {tpot['mean']:.2f} ms, P99 {tpot['p99']:.2f} ms\n"
        f"  {found['steps']} steps, {100 * found['graph_share']:.0f} % from fixed buffers; device "
        f"busy {100 * found['device_share']:.0f} % of their time\n"
        f"  L0: "
        + (f"{decisions}, all equal" if different is None else f"differs at step {different}")
    )
