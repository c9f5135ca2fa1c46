"""Our Triton kernels without a GPU: built for sm_90, and run in Triton's interpreter."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

triton = pytest.importorskip("triton", reason="triton is not installed: nothing to compile with")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from simkv.gpu import cuda_ops, kernels  # noqa: E402
from simkv.gpu.shapes import MODELS, ModelShape  # noqa: E402

HOPPER = GPUTarget("cuda", 90, 32)
SHAPES = [MODELS["llama-3-8b"], MODELS["qwen2.5-0.5b"]]
POINTERS = {
    "tables": "*i32",
    "row_seat": "*i32",
    "length": "*i32",
    "start": "*i32",
    "position": "*i32",
    "slot": "*i64",
    "partial": "*fp32",
    "weight": "*fp32",
    "cosine": "*fp32",
    "sine": "*fp32",
}
SCALARS = {"scale": "fp32", "eps": "fp32", "rows": "i32", "width": "i32"}


def build(kernel: Any, constants: dict[str, int | bool], **options: int) -> Any:
    """Compile a kernel for sm_90; pointers are to bf16 unless ``POINTERS`` says otherwise."""

    def kind(name: str) -> str:
        if name in constants:
            return "constexpr"
        return SCALARS.get(name) or POINTERS.get(name) or ("i32" if "stride" in name else "*bf16")

    names = kernel.arg_names
    signature = {name: kind(name) for name in names}
    whole = [["tt.divisibility", 16]]
    aligned = [n for n in names if signature[n].startswith("*") or "stride" in n]
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): whole for name in aligned},
    )
    return triton.compile(source, target=HOPPER, options=options)


def resources(kernel: Any) -> dict[str, int]:
    """What the assembler says of a kernel: registers, bytes of stack and of local memory."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {name: int(n) for name, n in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text)}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Nothing that was built before counts."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def heads(shape: ModelShape, padded: int, block_size: int) -> dict[str, int | bool]:
    return {
        "HEADS": shape.heads,
        "GROUP": shape.group,
        "PADDED": padded,
        "D": shape.head_dim,
        "BLOCK_SIZE": block_size,
    }


@pytest.mark.parametrize("block_size", [1, 16])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_decode(shape, block_size):
    tiles = cuda_ops.decode_tiles(shape.head_dim)
    padded = max(cuda_ops.power_of_two(shape.group), tiles.rows)
    constants = heads(shape, padded, block_size) | {"TILE": tiles.tile, "SPLITS": 8}
    built = build(kernels.decode, constants, num_warps=tiles.warps, num_stages=tiles.stages)
    found = resources(built)
    assert (found["STACK"], found["LOCAL"]) == (0, 0), found
    assert found["REG"] <= 128  # four of these programs fit a multiprocessor's registers
    assert "mma" in built.asm["ptx"]
    assert "cp.async" in built.asm["ptx"]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_prefill(shape):
    tiles = cuda_ops.prefill_tiles(shape.head_dim)
    padded = cuda_ops.power_of_two(shape.group)
    constants = heads(shape, padded, 16) | {"TILE": tiles.tile, "QUERIES": tiles.rows // padded}
    built = build(kernels.prefill, constants, num_warps=tiles.warps, num_stages=tiles.stages)
    found = resources(built)
    assert (found["STACK"], found["LOCAL"]) == (0, 0), found
    assert "wgmma" in built.asm["ptx"]


def test_prefill_with_too_few_warps_spills():
    """So the check above can fail."""
    shape = MODELS["llama-3-8b"]
    constants = heads(shape, 4, 16) | {"TILE": 64, "QUERIES": 32}
    found = resources(build(kernels.prefill, constants, num_warps=4, num_stages=3))
    assert found["STACK"] > 0


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_small_kernels(shape):
    total = shape.heads + 2 * shape.kv_heads
    built = [
        build(kernels.reduce, {"HEADS": shape.heads, "D": shape.head_dim, "SPLITS": 64}),
        build(kernels.add_norm, {"ADD": True, "WIDTH": cuda_ops.power_of_two(shape.hidden)}),
        build(kernels.silu_mul, {"WIDTH": 1024}),
        build(
            kernels.rotate_and_store,
            {
                "HEADS": shape.heads,
                "KV_HEADS": shape.kv_heads,
                "D": shape.head_dim,
                "BLOCK_SIZE": 16,
                "ALL": cuda_ops.power_of_two(total),
            },
        ),
    ]
    for kernel in built:
        found = resources(kernel)
        assert (found["STACK"], found["LOCAL"]) == (0, 0), found


def version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:3])


@pytest.mark.skipif(
    version(triton.__version__) < (3, 7, 1) and version(np.__version__) >= (2, 4),
    reason=f"triton {triton.__version__} cannot interpret with numpy {np.__version__}: "
    "numpy < 2.4 or triton >= 3.7.1 is needed",
)
def test_interpreted():
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-m", "tests.gpu.interpreted"]
    done = subprocess.run(
        command, env=environment, cwd=root, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "model" in done.stdout
