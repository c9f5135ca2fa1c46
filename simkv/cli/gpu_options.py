"""Options of the ``simkv gpu`` commands, and the validated setup of a device."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from simkv.core.errors import InputError, spelling_hint

if TYPE_CHECKING:
    from simkv.gpu.execution_record import GpuSetup

Device = Annotated[str, typer.Option(help="Torch device: cuda, cuda:N or cpu (slow, for tests).")]
Model = Annotated[
    str | None,
    typer.Option(
        help="Use the layer shapes of this model, with random weights (default on a GPU: "
        "llama-3-8b if it fits, otherwise qwen2.5-0.5b; on a CPU: the model 'small')."
    ),
]
KvTokens = Annotated[
    int | None,
    typer.Option(
        "--kv-tokens",
        metavar="TOKENS",
        min=1,
        help="Size of the KV cache in tokens (default: all tokens that fit, at most 400,000).",
    ),
]
Small = Annotated[bool, typer.Option(help="Measure small batch sizes only, for the tiny model.")]
WarmUp = Annotated[
    float | None,
    typer.Option(
        metavar="SECONDS",
        help="Warm-up time in seconds before the measurements (default: 10 on a GPU, 0 on a CPU).",
    ),
]
Threads = Annotated[int, typer.Option(help="Number of torch threads with --device cpu.")]
Clock = Annotated[
    str,
    typer.Option(
        metavar="wall|cpu",
        help="Clock for measurements: wall (elapsed time) or cpu (CPU time, for a machine with "
        "other load).",
    ),
]
Repeats = Annotated[
    int, typer.Option(help="Number of repetitions of each measurement; the median is used.")
]
RunFolder = Annotated[Path, typer.Argument(help="Results directory of `simkv gpu run`.")]


def parse_duration(text: str) -> float:
    """Parse a duration such as 90s, 8m or 1h to seconds. Raises InputError."""
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
    model: str | None,
    graphs: bool,
    warm_up: float | None,
    threads: int,
    seed: int,
    clock: str = "wall",
) -> GpuSetup:
    """Validate the options and return the device setup. Raises InputError for invalid options."""
    if find_spec("torch") is None:
        raise InputError("torch is not installed; run: pip install 'simkv[gpu]'")
    from simkv.costs.hardware.model_shape import MODEL_SHAPES

    if model is not None and model not in MODEL_SHAPES:
        known = ", ".join(MODEL_SHAPES)
        raise InputError(
            f"--model {model}: unknown model{spelling_hint(model, MODEL_SHAPES)}; "
            f"expected one of {known}"
        )
    import torch

    from simkv.gpu.device_memory import default_model
    from simkv.gpu.execution_record import GpuSetup

    try:
        kind = torch.device(device).type
    except RuntimeError as error:
        raise InputError(f"--device {device}: expected cuda, cuda:<n> or cpu") from error
    if kind not in ("cuda", "cpu"):
        raise InputError(
            f"--device {device}: not supported; simkv runs on NVIDIA GPUs (cuda, cuda:<n>) and "
            "on the CPU (cpu). torch for ROCm shows AMD GPUs as cuda; this is untested"
        )
    if kind == "cuda" and not torch.cuda.is_available():
        raise InputError(
            f"--device {device}: torch {torch.__version__} finds no such device on this machine"
        )
    _use_clock(clock, kind, threads)
    if kind == "cpu":
        torch.set_num_threads(threads)
    if warm_up is None:
        warm_up = 10.0 if kind == "cuda" else 0.0
    shape = MODEL_SHAPES[model or default_model(device)]
    largest = 2816 if graphs else 0
    return GpuSetup(shape, device, largest, warm_up, seed, overlap=kind == "cuda")


def _use_clock(clock: str, kind: str, threads: int) -> None:
    """Set the clock for all measurements. Raises InputError if it does not fit the device."""
    from simkv.gpu import timer

    clocks: dict[str, timer.ClockName] = {"wall": "wall", "cpu": "cpu"}
    if clock not in clocks:
        raise InputError(f"--clock {clock}: expected wall or cpu")
    if clock == "cpu" and (kind != "cpu" or threads != 1):
        raise InputError(
            "--clock cpu: requires a single thread on the CPU; add --device cpu --threads 1"
        )
    timer.use_clock(clocks[clock])
