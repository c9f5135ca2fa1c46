"""Run the Triton kernels in Triton's interpreter. The interpreter must be selected before Triton is
imported.

TRITON_INTERPRET=1 python -m tests.gpu.interpret_kernels

The program prints each comparison with its largest relative error, and fails if an error is too
large. ALL=1 compares many shapes with contexts up to 8,192 tokens, which takes minutes.
PLANTED='[["old", "new"], ...]' replaces pieces of the kernels' source, one at a time, and reports
whether the comparison of attention detects each change.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import tempfile
from pathlib import Path
from types import ModuleType

import torch

from simkv.costs.hardware.model_shape import MODEL_SHAPES
from simkv.gpu import cpu_ops, cuda_ops, triton_kernels
from simkv.gpu.batch_inputs import StepSize
from tests.gpu import test_attention, test_transformer
from tests.gpu.random_scheduler import RandomServer

#: Each case: seed, heads, KV heads, head dimension, block size and layout. The last case has one
#: split; softmax is rescaled from tile to tile within a program.
CASES = [
    (0, 14, 2, 64, 16, "block", None),
    (2, 8, 2, 128, 1, "layer", None),
    (3, 4, 2, 16, 8, "block", 1),
    (5, 4, 4, 32, 5, "layer", 4),
    (9, 4, 2, 16, 8, "block", 4),
]


def attention(cases: list) -> None:
    chosen = cuda_ops.splits_for
    for seed, heads, kv_heads, dim, block_size, layout, splits in cases:
        cuda_ops.splits_for = chosen if splits is None else lambda *_, s=splits: s
        c = test_attention.case(seed, heads, kv_heads, dim, block_size, layout)
        found = cuda_ops.attend(c.q, c.fields, c.size, c.keys, c.values, c.tables)
        report(
            f"attention {heads}/{kv_heads}x{dim} {c.size}", test_attention.worst(found, c.expected)
        )
    cuda_ops.splits_for = chosen


#: Contexts and new tokens of the comparisons with ALL.
LONG = [(8191, 1), (4000, 1), (1, 1), (0, 150), (8000, 40), (127, 129), (2048, 2), (0, 1)]


def many() -> None:
    """Compare every group size with both head sizes, for block sizes from 8 to 128 tokens and both
    layouts.
    """
    shapes = [(group, dim) for group in (1, 2, 4, 7, 8, 16) for dim in (64, 128)]
    for number, (group, dim) in enumerate(shapes):
        block_size, layout = (8, 16, 64, 128)[number % 4], ("block", "layer")[number // 2 % 2]
        c = test_attention.case(number, 2 * group, 2, dim, block_size, layout, LONG)
        found = cuda_ops.attend(c.q, c.fields, c.size, c.keys, c.values, c.tables)
        report(
            f"group {group} x {dim}, blocks of {block_size}, {layout}, {c.size}",
            test_attention.worst(found, c.expected),
        )
    print(f"{len(shapes)} shapes")


def fusions() -> None:
    x, y, weight = torch.randn(5, 96), torch.randn(5, 96), torch.randn(96)
    for residual in (None, y):
        wanted = cpu_ops.add_norm(residual, x, weight, 1e-5)
        found = cuda_ops.add_norm(
            residual if residual is None else residual.clone(), x, weight, 1e-5
        )
        for a, b in zip(found, wanted, strict=True):
            report("add_norm", relative(a, b))
    report("silu_mul", relative(cuda_ops.silu_mul(x), cpu_ops.silu_mul(x)))
    qkv = torch.randn(5, 10 * 16)
    position, slot = torch.tensor([3, 0, 7, 1, 2]), torch.tensor([5, 9, 11, 0, 18])
    cosine, sine = torch.randn(8, 8), torch.randn(8, 8)
    caches = [torch.zeros(6, 2, 4, 2, 16) for _ in range(2)]
    turned = [
        ops.rotate_and_store(qkv, position, slot, cosine, sine, cache[:, 0], cache[:, 1])
        for ops, cache in zip((cuda_ops, cpu_ops), caches, strict=True)
    ]
    report("rotate", relative(*turned))
    report("store", relative(*caches))


def model() -> None:
    """Compare whole steps, token by token, with the dense model."""
    server = RandomServer(1, MODEL_SHAPES["tiny"], block_size=4, requests=1, graph_tokens=0)
    server.runner.model.ops = cuda_ops
    server.live[0].output = 3  # each takes seconds; one of the requests is computed again
    wrong = test_transformer.wrong_tokens(server)
    report(f"model {sum(map(len, (x.emitted for x in server.live)))} tokens", float(wrong))


def with_planted(old: str, new: str) -> ModuleType:
    """Return the kernels with a part of their source replaced."""
    assert triton_kernels.__file__
    source = Path(triton_kernels.__file__).read_text()
    assert source.count(old) == 1, f"{old!r} stands {source.count(old)} times in the source"
    path = Path(tempfile.mkdtemp()) / "kernels.py"  # Triton reads the source from this file
    path.write_text(source.replace(old, new))
    spec = importlib.util.spec_from_file_location("simkv.gpu.triton_kernels", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def is_seen(module: ModuleType) -> bool:
    """Return whether attention with these kernels fails, in a process that may crash."""
    child = os.fork()
    if not child:
        failed = 1
        try:
            cuda_ops.triton_kernels = module
            attention(CASES[2:])
            failed = 0
        finally:
            os._exit(failed)
    return os.waitpid(child, 0)[1] != 0


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def report(what: str, error: float) -> None:
    print(f"{what}: {error:.1e}", flush=True)
    assert error < 1e-6, what


if __name__ == "__main__":
    assert cuda_ops.splits_for(StepSize(1, 1, 0), 2) > 1
    if planted := os.environ.get("PLANTED"):
        for old, new in json.loads(planted):
            print(is_seen(with_planted(old, new)), old, new, sep="\t", flush=True)
        sys.exit()
    if os.environ.get("ALL"):
        many()
        sys.exit()
    attention(CASES)
    fusions()
    model()
