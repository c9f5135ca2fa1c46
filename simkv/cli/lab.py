"""``simkv gpu``: parse, call, print."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from simkv.cli.common import Trust, complain, progress
from simkv.cli.words import Commands
from simkv.core.errors import InputError, nearest
from simkv.core.files import check_file, write_text

if TYPE_CHECKING:
    from collections.abc import Iterable

    from simkv.lab.bench import Reading
    from simkv.lab.served import Served, Setup

app = typer.Typer(
    cls=Commands, no_args_is_help=True, help="Run scenarios for real: a transformer on a device."
)

Device = Annotated[str, typer.Option(help="cuda, or cpu (slow, for tests).")]
Model = Annotated[str, typer.Option(help="Shape of the model.")]
Small = Annotated[bool, typer.Option(help="Small sizes, for the tiny model.")]
PoolLayout = Annotated[
    str, typer.Option(help="block: a block is one piece of memory; layer: a layer is.")
]
WarmUp = Annotated[float | None, typer.Option(help="Seconds of steps before the clock starts.")]
Threads = Annotated[int, typer.Option(help="Threads of torch on a CPU.")]
Clock = Annotated[
    str, typer.Option(help="wall, or on a CPU that others use: cpu, the time of this thread.")
]
Repeats = Annotated[int, typer.Option(help="Runs of each point; their median counts.")]
ServedFolder = Annotated[Path, typer.Argument(help="A folder that `simkv gpu serve` has written.")]
ProfileFile = Annotated[Path, typer.Option(help="The cost profile to be judged (JSON).")]


@app.command()
def serve(
    scenario: Annotated[
        Path, typer.Argument(help="A scenario file (YAML), or the name of a packaged one.")
    ],
    device: Device = "cuda",
    model: Model = "llama-3-8b",
    variant: Annotated[
        list[str] | None, typer.Option(help="Serve only these variants; may be repeated.")
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="PATH=VALUE", help="Override a field; may be repeated."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the results; default runs/gpu-<scenario>/.")
    ] = None,
    layout: PoolLayout = "block",
    graphs: Annotated[bool, typer.Option(help="Capture CUDA graphs.")] = True,
    warm_up: WarmUp = None,
    threads: Threads = 1,
    seed: Annotated[int, typer.Option(help="Seed of the weights.")] = 0,
    _trusted: Trust = False,
) -> None:
    """Serve a scenario's workload by the wall clock; write what each request and step took.

    Afterwards the simulation is fed the measured times; it must have made the same decisions.
    """
    from simkv.report.files import check_run_folder
    from simkv.scenario.load import load
    from simkv.scenario.packaged import find

    setup = device_setup(device, model, layout, graphs, warm_up, threads, seed)
    path = find(scenario)
    variants = load(path, set_ or [])
    for name in variant or []:
        if name not in variants:
            known = ", ".join(variants)
            raise InputError(f"--variant {name}: not in {path}{nearest(name, variants)}; {known}")
    chosen = {k: v for k, v in variants.items() if not variant or k in variant}
    folder = out or Path("runs") / f"gpu-{next(iter(chosen.values())).name}"
    check_run_folder(folder)

    from simkv.lab.serve import DeviceServer
    from simkv.lab.served import write_served
    from simkv.proof.validation.served.replay import verdict_of_run

    runs, same = {}, True
    for name, loaded in chosen.items():
        runs[name] = run = DeviceServer(loaded, setup).serve()
        different = verdict_of_run(run.scenario, run.passes, run.recorder).step
        print(_report(name, run, different))
        same &= different is None
    written = write_served(folder, runs, setup)
    print(f"Written to {folder}: {', '.join(written)}")
    if not same:
        raise typer.Exit(1)


@app.command()
def replay(
    folder: ServedFolder,
    _trusted: Trust = False,
) -> None:
    """Simulate a recorded run with its own step times; exit 1 at the first other decision."""
    from simkv.proof.validation.served.replay import read_runs

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
def validate(
    folder: ServedFolder,
    profile: ProfileFile,
    again: Annotated[
        Path | None, typer.Option(help="The same served once more: the noise of real runs.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write the tables as JSON to this file.")] = None,
    _trusted: Trust = False,
) -> None:
    """Judge a profile by a real run: decisions (L0), steps (L1) and a free simulation (L2).

    Exit 1 if a simulation that is fed the run's own times decides otherwise.
    """
    from simkv.costs.profile import load_profile
    from simkv.proof.validation.served.levels import validation
    from simkv.proof.validation.served.page import report
    from simkv.proof.validation.served.replay import read_runs

    judged = load_profile(profile.name, profile.parent)
    repeated = read_runs(again) if again else {}
    found = {
        variant: validation(run, judged, [repeated[variant]] if variant in repeated else [])
        for variant, run in read_runs(folder).items()
    }
    for variant, result in found.items():
        for line in report(variant, result):
            print(line)
    if out:
        tables = {name: asdict(result) for name, result in found.items()}
        text = json.dumps(tables, indent=1, default=lambda error: error.model_dump())
        write_text(out, text + "\n")
    if any(result.verdict.step is not None for result in found.values()):
        raise typer.Exit(1)


@app.command()
def bench(
    device: Device = "cuda",
    model: Model = "llama-3-8b",
    small: Small = False,
    repeats: Repeats = 20,
    fa3: Annotated[
        Path | None,
        typer.Option(help="_vllm_fa3_C.abi3.so out of a wheel of vLLM, to stand beside ours."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write the rows as JSON to this file.")] = None,
    warm_up: WarmUp = None,
    threads: Threads = 1,
) -> None:
    """Show how near attention and whole steps come to the device's ceilings, in both layouts."""
    setup = device_setup(device, model, "block", True, warm_up, threads, 0)
    if out:
        check_file("--out", out)
    from simkv.lab.anchor import Anchor
    from simkv.lab.bench import SIZES, SMALL_SIZES, beside
    from simkv.lab.bench import bench as measured

    found = []
    sizes = SMALL_SIZES if small else SIZES
    about = (setup.shape, sizes, setup.device)

    def shown(rows: Iterable[Reading]) -> None:
        for row in rows:
            print(row, flush=True)
            found.append(row._asdict())
            if out:
                write_text(out, json.dumps(found, indent=1) + "\n")

    shown(measured(*about, repeats=repeats, warm_up=setup.warm_up))
    if fa3:
        try:
            shown(beside(Anchor(fa3), *about, repeats=repeats))
        except (InputError, RuntimeError, TypeError) as error:  # all else has been measured
            complain(error)
            raise typer.Exit(2) from error


@app.command()
def calibrate(
    out: Annotated[Path, typer.Argument(help="Folder of the campaign; goes on if it has begun.")],
    device: Device = "cuda",
    model: Model = "llama-3-8b",
    budget: Annotated[str, typer.Option(help="Time to measure in, such as 8m or 90s.")] = "8m",
    small: Small = False,
    kv_tokens: Annotated[int | None, typer.Option(help="Tokens of KV to measure with.")] = None,
    layout: PoolLayout = "block",
    repeats: Repeats = 20,
    warm_up: WarmUp = None,
    threads: Threads = 1,
    clock: Clock = "wall",
) -> None:
    """Measure what steps cost on this device, fit a cost profile, and tell how wrong it is."""
    setup = device_setup(device, model, layout, True, warm_up, threads, 0, clock)
    budget_s = seconds_of(budget)
    from simkv.lab import calibrate as campaign
    from simkv.lab.probes import SMALL, Limits

    limits = SMALL if small else Limits()
    if kv_tokens:
        limits = replace(limits, kv_tokens=kv_tokens)
    with progress("measurements") as advance:
        profile, samples = campaign.calibrate(
            setup, limits, out, budget_s, repeats=repeats, progress=advance
        )
    print(f"{len(samples)} measurements; {profile.source[-1]}")
    for what, value in campaign.achieved(samples, setup.shape, setup.itemsize).items():
        print(f"{what}: {value}")
    print("Error on steps of real runs that were not fitted to (median, P95, bias):")
    for kind, error in profile.fit.held_out.items():
        shares = [100 * x for x in (error.median, error.p95, error.bias)]
        print(f"  {kind:<8}{shares[0]:6.1f} % {shares[1]:6.1f} % {shares[2]:+6.1f} %", end="")
        print(f"  of {error.points} steps")
    print(f"Written to {out}: {', '.join(sorted(p.name for p in out.iterdir()))}")


def seconds_of(text: str) -> float:
    """A span of time such as 90s, 8m or 1h, in seconds. Raises InputError."""
    units = {"s": 1.0, "m": 60.0, "h": 3600.0}
    try:
        seconds = float(text[:-1]) * units[text[-1:]]
    except (KeyError, ValueError):
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise InputError(f"--budget {text}: expected a time such as 90s, 8m or 1h")
    return seconds


def device_setup(
    device: str,
    model: str,
    layout: str,
    graphs: bool,
    warm_up: float | None,
    threads: int,
    seed: int,
    clock: str = "wall",
) -> Setup:
    """Checked options. Raises InputError for what there is not."""
    if find_spec("torch") is None:
        raise InputError("torch is not installed; install simkv with the extra: simkv[gpu]")
    from simkv.costs.hardware.shapes import MODELS

    if model not in MODELS:
        known = ", ".join(MODELS)
        raise InputError(f"--model {model}: not known{nearest(model, MODELS)}; expected {known}")
    layouts: dict[str, Literal["block", "layer"]] = {"block": "block", "layer": "layer"}
    if layout not in layouts:
        raise InputError(f"--layout {layout}: expected block or layer")
    import torch

    from simkv.lab.served import Setup

    try:
        kind = torch.device(device).type
    except RuntimeError as error:
        raise InputError(f"--device {device}: expected cuda, cuda:<n> or cpu") from error
    if kind not in ("cuda", "cpu") or (kind == "cuda" and not torch.cuda.is_available()):
        raise InputError(f"--device {device}: torch {torch.__version__} finds no such device here")
    _use_clock(clock, kind, threads)
    if kind == "cpu":
        torch.set_num_threads(threads)
    if warm_up is None:
        warm_up = 10.0 if kind == "cuda" else 0.0
    shape = MODELS[model]
    largest = 2816 if graphs else 0
    return Setup(shape, device, layouts[layout], largest, warm_up, seed, overlap=kind == "cuda")


def _use_clock(clock: str, kind: str, threads: int) -> None:
    """Take the clock for all that is timed. Raises InputError for one that would tell nothing."""
    from simkv.lab import ticks

    clocks: dict[str, ticks.ClockName] = {"wall": "wall", "cpu": "cpu"}
    if clock not in clocks:
        raise InputError(f"--clock {clock}: expected wall or cpu")
    if clock == "cpu" and (kind != "cpu" or threads != 1):
        raise InputError("--clock cpu: is that of one thread; use --device cpu --threads 1")
    ticks.use(clocks[clock])


def _report(name: str, run: Served, different: int | None) -> str:
    """The main figures of a run, and the first decision that a simulation fed its times makes
    otherwise."""
    found = run.summary
    ttft, tpot = found["ttft_ms"], found["tpot_ms"]
    decisions = f"{len(run.recorder.lines)} decisions"
    return (
        f"{name}: {found['finished']} of {found['requests']} finished in "
        f"{found['makespan_s']:.3f} s, {found['preemptions']} preemptions, "
        f"{found['output_throughput']:.1f} output tok/s\n"
        f"  TTFT mean {ttft['mean']:.2f} ms, P99 {ttft['p99']:.2f} ms; "
        f"TPOT mean {tpot['mean']:.2f} ms, P99 {tpot['p99']:.2f} ms\n"
        f"  {found['steps']} steps, {100 * found['graph_share']:.0f} % from fixed buffers, device "
        f"busy for {100 * found['device_share']:.0f} % of their time\n"
        f"  L0: "
        + (f"{decisions}, all the same" if different is None else f"parts at step {different}")
    )
