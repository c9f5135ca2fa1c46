"""Test every part of the GPU engine on this device; ``on-gpu.sh smoke`` calls it.

    python calibrate/smoke.py OUT [--model NAME] [--rehearse]     all stages, one line for each
    python calibrate/smoke.py OUT --stage attention               one stage, in this process

Each stage is a process with its own time limit, so that the others run even if one fails. The
summary names the file to look at. Exit 1 if any stage failed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


class Options(NamedTuple):
    """Options of a stage."""

    out: Path
    device: str
    model: str | None


def imports(given: Options) -> str:
    """Report versions and the device."""
    import numpy as np
    import pydantic
    import simpy
    import torch

    from simkv.gpu.machine_info import machine_info

    found = {k: v for k, v in machine_info(given.device).items() if k != "date"}
    versions = f"numpy {np.__version__}, pydantic {pydantic.VERSION}, simpy {simpy.__version__}"
    if given.device == "cuda":
        found["capability"] = torch.cuda.get_device_capability()
        assert not torch.version.hip, "this is torch for ROCm; AMD GPUs are untested"
    return f"{', '.join(f'{k} {v}' for k, v in found.items())}, {versions}"


def attention(given: Options) -> str:
    """Compare attention with float64."""
    import torch

    from tests.gpu import device_checks

    worst = 0.0
    for heads in ((32, 8, 128), (14, 2, 64)):
        for layout in ("block", "layer"):
            for seed in range(3):
                error = device_checks.attention_error(
                    seed, heads, 16, layout, torch.bfloat16, given.device
                )
                assert error < device_checks.ALLOWED[torch.bfloat16], (heads, layout, seed, error)
                worst = max(worst, error)
    return f"largest error of bfloat16 decodes and prefills against float64: {worst:.1e}"


def far(given: Options) -> str:
    """Compare attention with float64 in blocks beyond 2^31 numbers."""
    import torch

    from tests.gpu import device_checks

    errors = device_checks.far_errors(given.device)
    assert max(errors) < device_checks.ALLOWED[torch.bfloat16], errors
    return f"largest error in blocks beyond 2^31 numbers: {max(errors):.1e}"


def graphs(given: Options) -> str:
    """Compare CUDA graphs with eager steps."""
    from tests.gpu import device_checks

    assert device_checks.graphs_change_nothing(given.device), (
        "the KV cache differs between graphs and eager steps"
    )
    return "the KV cache is equal bit for bit with graphs and with eager steps"


def l0(given: Options) -> str:
    """Serve a scenario and replay its decisions."""
    from tests.gpu import device_checks

    verdict = device_checks.l0(given.device)
    assert verdict.step is None, verdict
    return f"all {verdict.decisions} decisions of a run of the tiny model are equal in its replay"


def model(given: Options) -> str:
    """Load the model, capture graphs and time a step."""
    import torch

    from simkv.costs.hardware.model_shape import MODEL_SHAPES
    from simkv.gpu.batch_runner import RunnerConfig
    from simkv.gpu.cuda_graphs import StepGraphs
    from simkv.gpu.device_memory import default_model, new_runner
    from simkv.gpu.execution_record import GpuSetup
    from simkv.gpu.graph_buckets import step_size
    from simkv.gpu.sentinel_step import time_sentinel

    begin = perf_counter()
    name = given.model or default_model(given.device)
    config = RunnerConfig(num_blocks=2200, block_size=16, seats=64, max_len=4096, graph_tokens=0)
    runner = new_runner(GpuSetup(MODEL_SHAPES[name], given.device), config)
    loaded = perf_counter() - begin
    counts = [(64, 0, 64), (1, 0, 1), (256, 0, 256), (0, 1, 512), (64, 1, 2048)]
    runner.graphs = StepGraphs(runner.model, {step_size(*count, 256) for count in counts})
    captured = perf_counter() - begin - loaded
    runner.warm_up(1.0)
    step = time_sentinel(runner)
    peak = torch.cuda.max_memory_allocated() / 2**30 if runner.on_gpu else 0.0
    return (
        f"{name}: {loaded:.1f} s to load, {captured:.1f} s for 5 graphs, {1e3 * step:.2f} ms for a "
        f"step of 64 rows with 512 tokens of context, at most {peak:.1f} GiB"
    )


def varlen(given: Options) -> str:
    """Call the attention of torch that `gpu bench` compares with, if it is there."""
    if given.device == "cpu":
        return "torch has varlen_attn for GPUs only; it is not needed"
    from simkv.costs.hardware.model_shape import MODEL_SHAPES
    from simkv.gpu.kernel_benchmark import SMALL_SIZES, compare_attention
    from simkv.gpu.microbenchmark import Microbenchmark
    from simkv.gpu.varlen_baseline import VarlenAttention, find_varlen

    attention = find_varlen()
    if attention is None:
        return "this torch has no varlen_attn; it is not needed"
    made = Microbenchmark(MODEL_SHAPES["qwen2.5-0.5b"], SMALL_SIZES, given.device)
    readings = list(compare_attention(made, VarlenAttention(attention)))
    assert readings[-1].value < 0.02, readings
    return "; ".join(map(str, readings))


def tiles(given: Options) -> str:
    """Time every candidate of tile sizes."""
    if given.device == "cpu":
        return "no kernels run on a CPU"
    import json

    from simkv.costs.hardware.model_shape import MODEL_SHAPES
    from simkv.gpu.device_memory import default_model, fit_limits
    from simkv.gpu.execution_record import GpuSetup
    from simkv.gpu.kernel_benchmark import SIZES, fastest, sizes_for, time_tiles
    from simkv.gpu.machine_info import machine_info

    shape = MODEL_SHAPES[given.model or default_model(given.device)]
    pool = fit_limits(GpuSetup(shape, given.device), SIZES, None).kv_tokens
    readings = []
    for one in time_tiles(shape, sizes_for(pool), given.device):
        readings.append(one)
        print(one[2], flush=True)
    found = {machine_info(given.device)["device"]: fastest(readings, shape.head_dim)}
    text = json.dumps(found, indent=1) + "\n"
    (given.out / "tiles.json").write_text(text, encoding="utf-8")
    return f"the fastest are in {given.out}/tiles.json: {found}"


class Stage(NamedTuple):
    """A stage: its function, its time limit, and where to look if it fails."""

    run: Callable[[Options], str]
    limit_s: int
    look_at: str


#: Factor on the time limits of a rehearsal, whose machine may be shared.
SLACK = 10
STAGES = {
    # The first import on a fresh machine reads several GB of libraries.
    "imports": Stage(imports, 120, "calibrate/wheels.txt; the driver, if torch finds no device"),
    "attention": Stage(attention, 60, "simkv/gpu/triton_kernels.py: decode, reduce, prefill"),
    "far": Stage(far, 40, "simkv/gpu/triton_kernels.py: to(tl.int64) of blocks and rows"),
    "graphs": Stage(graphs, 60, "simkv/gpu/cuda_graphs.py; kernels that read padding"),
    "l0": Stage(l0, 60, "simkv/gpu/torch_executor.py, scenario_execution.py"),
    "model": Stage(model, 90, "simkv/gpu/transformer.py, cuda_graphs.py; the free memory"),
    "varlen": Stage(varlen, 40, "simkv/gpu/varlen_baseline.py; only a baseline of gpu bench"),
    "tiles": Stage(tiles, 60, "simkv/gpu/triton_tile_configs.py: remove what does not build"),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--model")
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--stage", choices=STAGES)
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES))
    arguments = parser.parse_args()
    if arguments.stage:
        device = "cpu" if arguments.rehearse else "cuda"
        print(STAGES[arguments.stage].run(Options(arguments.out, device, arguments.model)))
        return 0
    slack = SLACK if arguments.rehearse else 1
    failed = [name for name in arguments.stages if not passed(name, sys.argv[1:], slack)]
    for name in failed:
        print(f"FAILED {name}: look at {STAGES[name].look_at}; smoke-{name}.log")
    print(f"{len(arguments.stages) - len(failed)} of {len(arguments.stages)} stages passed")
    return 1 if failed else 0


def passed(name: str, arguments: list[str], slack: int = 1) -> bool:
    """Run a stage as a process, print its line and store its output."""
    begin, limit = perf_counter(), slack * STAGES[name].limit_s
    command = [sys.executable, __file__, *arguments, "--stage", name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)
        output, well = done.stdout + done.stderr, done.returncode == 0
    except subprocess.TimeoutExpired as error:
        output, well = f"{_text(error.stdout)}{_text(error.stderr)}stopped after {limit} s", False
    Path(arguments[0], f"smoke-{name}.log").write_text(output, encoding="utf-8")
    last = output.strip().splitlines()[-1:] or ["no output"]
    state = "ok  " if well else "FAIL"
    print(f"{state} {name} ({perf_counter() - begin:.0f} s): {last[0]}", flush=True)
    return well


def _text(output: bytes | str | None) -> str:
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""


if __name__ == "__main__":
    sys.exit(main())
