"""Does each part work at all on this device? See calibrate/README.md; ``on-gpu.sh smoke`` calls it.

    python calibrate/smoke.py OUT [--fa3 FILE] [--rehearse]     all stages, a line for each
    python calibrate/smoke.py OUT --stage attention             one of them, in this process

Each stage is a process of its own with a limit of its own, so whatever fails, the rest goes on. The
summary says what to look at. Exit 1 if any failed.
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
    """What a stage is told."""

    out: Path
    device: str
    model: str
    fa3: Path | None


def imports(given: Options) -> str:
    import numpy as np
    import pydantic
    import simpy
    import torch

    from simkv.gpu.machine_info import machine_info

    found = {k: v for k, v in machine_info(given.device).items() if k != "date"}
    versions = f"numpy {np.__version__}, pydantic {pydantic.VERSION}, simpy {simpy.__version__}"
    if given.device == "cuda":
        found["capability"] = torch.cuda.get_device_capability()
    return f"{', '.join(f'{k} {v}' for k, v in found.items())}, {versions}"


def attention(given: Options) -> str:
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
    return f"bfloat16 decodes and prefills are {worst:.1e} off float64 at most"


def far(given: Options) -> str:
    import torch

    from tests.gpu import device_checks

    errors = device_checks.far_errors(given.device)
    assert max(errors) < device_checks.ALLOWED[torch.bfloat16], errors
    return f"blocks beyond 2^31 numbers: {max(errors):.1e} off float64 at most"


def graphs(given: Options) -> str:
    from tests.gpu import device_checks

    assert device_checks.graphs_change_nothing(given.device), (
        "graphs leave another KV than eager steps"
    )
    return "graphs of the tiny model leave the KV of eager steps, bit for bit"


def l0(given: Options) -> str:
    from tests.gpu import device_checks

    verdict = device_checks.l0(given.device)
    assert verdict.step is None, verdict
    return f"a run of the tiny model replays: {verdict.decisions} decisions, all the same"


def model(given: Options) -> str:
    import torch

    from simkv.costs.hardware.model_shape import MODEL_SHAPES
    from simkv.gpu.batch_runner import Runner, RunnerConfig
    from simkv.gpu.cuda_graphs import StepGraphs
    from simkv.gpu.graph_buckets import step_size
    from simkv.gpu.sentinel_step import time_sentinel

    begin = perf_counter()
    config = RunnerConfig(num_blocks=3000, block_size=16, seats=64, max_len=4096, graph_tokens=0)
    runner = Runner(MODEL_SHAPES[given.model], config, given.device)
    loaded = perf_counter() - begin
    counts = [(64, 0, 64), (1, 0, 1), (256, 0, 256), (0, 1, 512), (64, 1, 2048)]
    runner.graphs = StepGraphs(runner.model, {step_size(*count, 256) for count in counts})
    captured = perf_counter() - begin - loaded
    runner.warm_up(1.0)
    step = time_sentinel(runner)
    peak = torch.cuda.max_memory_allocated() / 2**30 if runner.on_gpu else 0.0
    return (
        f"{given.model}: {loaded:.1f} s to load, {captured:.1f} s for 5 graphs, a step of 64 rows "
        f"with 512 tokens {1e3 * step:.2f} ms, {peak:.1f} GiB at most"
    )


def tiles(given: Options) -> str:
    import json

    from simkv.costs.hardware.model_shape import MODEL_SHAPES
    from simkv.gpu.kernel_benchmark import (
        SIZES,
        SMALL_SIZES,
        fastest,
        time_tiles,
    )
    from simkv.gpu.machine_info import machine_info

    shape, readings = MODEL_SHAPES[given.model], []
    for one in time_tiles(shape, SIZES if given.device == "cuda" else SMALL_SIZES, given.device):
        readings.append(one)
        print(one[2], flush=True)
    if not readings:
        return "no kernels run here, so there is nothing to choose from"
    found = {machine_info(given.device)["device"]: fastest(readings, shape.head_dim)}
    text = json.dumps(found, indent=1) + "\n"
    (given.out / "tiles.json").write_text(text, encoding="utf-8")
    return f"the fastest are in {given.out}/tiles.json: {found}"


class Stage(NamedTuple):
    """What is run, seconds that it may take, and what to look at if it fails."""

    run: Callable[[Options], str]
    limit_s: int
    look_at: str


#: How many times longer a rehearsal may take, on a machine that others use.
SLACK = 10
STAGES = {
    "imports": Stage(imports, 40, "calibrate/wheels.txt; the driver, if torch finds no device"),
    "attention": Stage(attention, 60, "simkv/gpu/triton_kernels.py: decode, reduce, prefill"),
    "far": Stage(far, 40, "simkv/gpu/triton_kernels.py: to(tl.int64) of blocks and rows"),
    "graphs": Stage(graphs, 60, "simkv/gpu/cuda_graphs.py; kernels that read what is padding"),
    "l0": Stage(
        l0, 60, "simkv/gpu/torch_executor.py, serve.py: what decides besides recorded times"
    ),
    "model": Stage(
        model, 90, "simkv/gpu/transformer.py, graphs.py; memory, if it is short of that"
    ),
    "tiles": Stage(tiles, 60, "simkv/gpu/triton_tile_configs.py: take out what does not build"),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--fa3", type=Path)
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--stage", choices=STAGES)
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES))
    arguments = parser.parse_args()
    device, model_name = ("cpu", "tiny") if arguments.rehearse else ("cuda", "llama-3-8b")
    if arguments.stage:
        given = Options(arguments.out, device, model_name, arguments.fa3)
        print(STAGES[arguments.stage].run(given))
        return 0
    slack = SLACK if arguments.rehearse else 1
    failed = [name for name in arguments.stages if not passed(name, sys.argv[1:], slack)]
    for name in failed:
        print(f"FAILED {name}: look at {STAGES[name].look_at}; {arguments.out}/smoke-{name}.log")
    print(f"{len(arguments.stages) - len(failed)} of {len(arguments.stages)} stages passed")
    return 1 if failed else 0


def passed(name: str, arguments: list[str], slack: int = 1) -> bool:
    """Run a stage as a process, print its line, keep what it said."""
    begin, limit = perf_counter(), slack * STAGES[name].limit_s
    command = [sys.executable, __file__, *arguments, "--stage", name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)
        said, well = done.stdout + done.stderr, done.returncode == 0
    except subprocess.TimeoutExpired as error:
        said, well = f"{_text(error.stdout)}{_text(error.stderr)}stopped after {limit} s", False
    Path(arguments[0], f"smoke-{name}.log").write_text(said, encoding="utf-8")
    last = said.strip().splitlines()[-1:] or ["nothing"]
    state = "ok  " if well else "FAIL"
    print(f"{state} {name} ({perf_counter() - begin:.0f} s): {last[0]}", flush=True)
    return well


def _text(said: bytes | str | None) -> str:
    return said.decode(errors="replace") if isinstance(said, bytes) else said or ""


if __name__ == "__main__":
    sys.exit(main())
