"""Compile the Triton kernels for GPUs that are absent, exactly as launches would.

    python -m tests.gpu.compile_kernels [80 100]

This compiles every kernel in every configuration for the given architectures (default: all). It
prints a line per build with its faults: spills, too much shared memory for a program, a decode
kernel that fits four times into the shared memory but not into the registers, or prefill on sm_90
without ``wgmma``. This takes some minutes; ``test_triton_kernels.py`` compiles a selection. Set
TRITON to the directory of an unpacked wheel to use another version of Triton.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

if other := os.environ.get("TRITON"):
    sys.path.insert(0, other)

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from simkv.costs.hardware.model_shape import MODEL_SHAPES, ModelShape
from simkv.gpu import cuda_ops, triton_kernels
from simkv.gpu.batch_inputs import StepSize, input_views, packed_length
from simkv.gpu.triton_tile_configs import (
    SHARED_MEMORY_BYTES,
    AttentionKernel,
    candidates,
    override_tiles,
)

SHAPES = [MODEL_SHAPES["llama-3-8b"], MODEL_SHAPES["qwen2.5-0.5b"]]
MIXED = StepSize(512, 256, 16)
Kernels = dict[str, list[Any]]


class NoDriver:
    """A driver that reports a GPU of the given architecture and nothing else."""

    def __init__(self, arch: int) -> None:
        self.arch = arch

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def compiling(arch: int) -> Iterator[Kernels]:
    """Collect kernels by name from launches that are compiled but not run."""
    found: Kernels = {}
    launch = JITFunction.run

    def build(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = launch(self, *arguments, grid=grid, warmup=True, **options)
        found.setdefault(self.__name__, []).append(kernel)
        return kernel

    for kernel in vars(triton_kernels).values():
        if isinstance(kernel, JITFunction):
            kernel.device_caches.clear()
    with (
        tempfile.TemporaryDirectory() as cache,
        patch.dict(os.environ, TRITON_CACHE_DIR=cache),
        patch.object(JITFunction, "run", build),
        patch.object(driver, "_active", NoDriver(arch)),
    ):
        yield found


def attend(shape: ModelShape, block_size: int, dtype: Any, *sizes: StepSize) -> None:
    """Launch the attention kernels for steps of these sizes."""
    kv_heads, dim = shape.kv_heads, shape.head_dim
    pool = torch.zeros(4, 2, block_size, kv_heads, dim, dtype=dtype)
    tables = torch.zeros(4, 64, dtype=torch.int32)
    for size in sizes:
        fields = input_views(torch.zeros(packed_length(size), dtype=torch.int32), size)
        q = torch.zeros(size.tokens, shape.heads, dim, dtype=dtype)
        cuda_ops.attend(q, fields, size, pool[:, 0], pool[:, 1], tables)


def fuse(shape: ModelShape, block_size: int, dtype: Any) -> None:
    """Launch the small fused kernels for a step of eight tokens."""
    kv_heads, dim = shape.kv_heads, shape.head_dim
    x, weight = torch.zeros(8, shape.hidden, dtype=dtype), torch.zeros(shape.hidden, dtype=dtype)
    for residual in (None, x.clone()):
        cuda_ops.add_norm(residual, x, weight, 1e-5)
    cuda_ops.silu_mul(torch.zeros(8, 2 * shape.intermediate, dtype=dtype))
    numbers = torch.zeros(8, dtype=torch.int32)
    turns = [torch.zeros(64, dim // 2, dtype=torch.float32) for _ in range(2)]
    pool = torch.zeros(4, 2, block_size, kv_heads, dim, dtype=dtype)
    qkv = torch.zeros(8, shape.qkv_width, dtype=dtype)
    cuda_ops.rotate_and_store(qkv, numbers, numbers.long(), *turns, pool[:, 0], pool[:, 1])


def resources(kernel: Any) -> dict[str, int]:
    """Return a kernel's registers, and its bytes of stack and of local memory."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {name: int(n) for name, n in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text)}


def wrong_with(name: str, kernel: Any, arch: int, *, wide: bool = False) -> list[str]:
    """Return the reasons why this build is slow or fails; ``wide`` is for float32 checks."""
    used, shared = resources(kernel), kernel.metadata.shared
    found = []
    if used["STACK"] or used["LOCAL"]:
        found.append(f"spills {used['STACK'] + used['LOCAL']} bytes a thread")
    available = SHARED_MEMORY_BYTES[arch]
    if shared > available:
        found.append(f"wants {shared} bytes of shared memory, sm_{arch} has {available}")
    four_fit = 4 * shared <= available
    if name == "decode" and four_fit and used["REG"] > 128 and not wide:
        found.append(f"takes {used['REG']} registers, so not four of it fit a multiprocessor")
    if name == "prefill" and arch == 90 and not wide and "wgmma" not in kernel.asm["ptx"]:
        found.append("has no wgmma")
    return found


def every(arch: int) -> Iterator[tuple[str, list[str]]]:
    """Yield every build that the runner may use on ``arch``, with its faults."""
    decodes = [StepSize(rows, rows, 0) for rows in (1, 16, 256)]  # from 64 splits to none
    for shape in SHAPES:
        for dtype in (torch.bfloat16, torch.float32):
            yield from fusions(arch, shape, dtype)
            for part in ("decode", "prefill"):
                yield from _attention(arch, shape, dtype, part, decodes)


def fusions(arch: int, shape: ModelShape, dtype: Any) -> Iterator[tuple[str, list[str]]]:
    """Yield the builds of the small fused kernels."""
    wide = dtype == torch.float32
    for block_size in (16,) if wide else (16, 1):
        with compiling(arch) as found:
            fuse(shape, block_size, dtype)
        for name, built in found.items():
            for kernel in built:
                what = f"sm_{arch} {shape.name} {dtype} block {block_size} {name}"
                yield _told(what, kernel), wrong_with(name, kernel, arch, wide=wide)


def _told(what: str, kernel: Any) -> str:
    return f"{what}: {resources(kernel)['REG']} registers, {kernel.metadata.shared} bytes"


def _attention(
    arch: int, shape: ModelShape, dtype: Any, part: AttentionKernel, decodes: list[StepSize]
) -> Iterator[tuple[str, list[str]]]:
    wide = dtype == torch.float32
    for tiles in candidates(part, shape.head_dim, dtype.itemsize, arch):
        for block_size in (16,) if wide else (16, 1):
            with compiling(arch) as found, override_tiles(part, tiles):
                sizes = [*decodes, MIXED] if part == "decode" else [StepSize(512, 0, 16)]
                attend(shape, block_size, dtype, *sizes)
            for name, built in found.items():
                for kernel in {id(k): k for k in built}.values():
                    what = f"sm_{arch} {shape.name} {dtype} block {block_size} {name}"
                    if name != "prefill" or part == "prefill":
                        wrong = wrong_with(name, kernel, arch, wide=wide)
                        yield _told(f"{what} {tuple(tiles)}", kernel), wrong


def main() -> int:
    print(f"triton {triton.__version__}")
    count = failed = 0
    for arch in map(int, sys.argv[1:] or SHARED_MEMORY_BYTES):
        for what, wrong in every(arch):
            count, failed = count + 1, failed + bool(wrong)
            print(f"{'BAD' if wrong else 'ok '} {what}{''.join(f'; {w}' for w in wrong)}")
    print(f"{count} builds, {failed} of them bad")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
