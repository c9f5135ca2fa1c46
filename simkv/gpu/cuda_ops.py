"""The operations of ``cpu_ops`` as launches of simkv's Triton kernels.

Grids and tile sizes depend only on the size of the step. Autotuning is not used, because it is
impossible inside a CUDA graph (see triton_tile_configs.py). The key-value head is the first grid
dimension, so that concurrent programs read the same blocks.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
from triton.runtime import driver

from simkv.gpu import triton_kernels
from simkv.gpu.batch_inputs import StepInputs, StepSize
from simkv.gpu.triton_tile_configs import AttentionKernel, Tiles, choose_tiles

#: Number of programs of a decode launch that fill an H200: four for each of its 132
#: multiprocessors.
BUSY_PROGRAMS = 528
#: Maximum number of splits of a row, and the assumed number of rows of a mixed step, whose slots
#: are mostly padding.
MOST_SPLITS = 64
MIXED_ROWS = 32


def tiles_of(kernel: AttentionKernel, q: torch.Tensor) -> Tiles:
    """Return the tile configuration of a kernel for the head size, type and device of ``q``."""
    device = _name(q.device) if q.is_cuda else ""
    return choose_tiles(kernel, q.shape[2], q.element_size(), arch=architecture(), device=device)


def architecture() -> int:
    """Return the device's compute capability as a number, such as 90; 0 for an AMD GPU.

    Triton's interpreter also gives 90.
    """
    try:
        found = driver.active.get_current_target().arch
    except RuntimeError:
        return 90
    return found if isinstance(found, int) else 0


@lru_cache(maxsize=8)
def _name(device: torch.device) -> str:
    return str(torch.cuda.get_device_name(device))


def splits_for(size: StepSize, kv_heads: int) -> int:
    """Return the number of programs per request and KV head in the decode kernel.

    The number is a power of two.
    """
    rows = min(size.decodes, MIXED_ROWS) if size.prefills else size.decodes
    wanted = -(-BUSY_PROGRAMS // (rows * kv_heads))
    return min(power_of_two(wanted), MOST_SPLITS)


def power_of_two(x: int) -> int:
    """Return the smallest power of two that is not less than ``x``."""
    return 1 << (x - 1).bit_length()


def add_norm(
    residual: torch.Tensor | None, x: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute ``cpu_ops.add_norm`` with ``residual`` changed in place.

    If ``residual`` is None, ``x`` takes its place.
    """
    x = x.contiguous()
    normed = torch.empty_like(x)
    width = x.shape[1]
    triton_kernels.add_norm[(len(x),)](
        x if residual is None else residual,
        x,
        weight,
        normed,
        width,
        eps,
        ADD=residual is not None,
        WIDTH=power_of_two(width),
        num_warps=8 if width > 2048 else 4,
    )
    return x if residual is None else residual, normed


def silu_mul(x: torch.Tensor) -> torch.Tensor:
    """Compute ``cpu_ops.silu_mul``."""
    width = x.shape[1] // 2
    out = x.new_empty(len(x), width)
    tile = min(power_of_two(width), 1024)
    triton_kernels.silu_mul[(len(x), -(-width // tile))](x, out, width, WIDTH=tile, num_warps=4)
    return out


def rotate_and_store(
    qkv: torch.Tensor,
    position: torch.Tensor,
    slot: torch.Tensor,
    cosine: torch.Tensor,
    sine: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> torch.Tensor:
    """Compute ``cpu_ops.rotate_and_store``."""
    block_size, kv_heads, dim = keys.shape[1:]
    heads = qkv.shape[1] // dim - 2 * kv_heads
    q = qkv.new_empty(len(qkv), heads, dim)
    triton_kernels.rotate_and_store[(len(qkv),)](
        qkv,
        q,
        position,
        slot,
        cosine,
        sine,
        keys,
        values,
        keys.stride(0),
        keys.stride(1),
        HEADS=heads,
        KV_HEADS=kv_heads,
        D=dim,
        BLOCK_SIZE=block_size,
        ALL=power_of_two(heads + 2 * kv_heads),
        num_warps=4,
    )
    return q


def attend(
    q: torch.Tensor,
    fields: StepInputs,
    size: StepSize,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor,
) -> torch.Tensor:
    """Compute ``cpu_ops.attend`` with separate kernels for decodes and prefills
    (vllm-project/vllm#29020).
    """
    out = torch.empty_like(q)
    if size.decodes:
        _decode(q, out, fields, size, keys, values, tables)
    if size.prefills:
        _prefill(q, out, fields, size, keys, values, tables)
    return out


def _decode(
    q: torch.Tensor,
    out: torch.Tensor,
    fields: StepInputs,
    size: StepSize,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor,
) -> None:
    heads, dim = q.shape[1:]
    kv_heads = keys.shape[2]
    splits = splits_for(size, kv_heads)
    partial = logsum = out
    if splits > 1:
        partial = q.new_empty(size.decodes, heads, splits, dim, dtype=torch.float32)
        logsum = q.new_empty(size.decodes, heads, splits, dtype=torch.float32)
    tiles = tiles_of("decode", q)
    triton_kernels.decode[(kv_heads, size.decodes, splits)](
        q,
        out,
        partial,
        logsum,
        keys,
        values,
        tables,
        fields.row_seat,
        fields.length,
        _scale(dim),
        keys.stride(0),
        keys.stride(1),
        tables.stride(0),
        SPLITS=splits,
        **_sizes(heads, kv_heads, keys, max(power_of_two(heads // kv_heads), tiles.rows)),
        **_build(tiles),
    )
    if splits > 1:
        triton_kernels.reduce[(size.decodes, heads)](
            partial,
            logsum,
            out,
            fields.length,
            HEADS=heads,
            D=dim,
            SPLITS=splits,
            num_warps=4 if splits >= 16 else 1,
        )


def _prefill(
    q: torch.Tensor,
    out: torch.Tensor,
    fields: StepInputs,
    size: StepSize,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor,
) -> None:
    heads, dim = q.shape[1:]
    kv_heads = keys.shape[2]
    tiles = tiles_of("prefill", q)
    padded = power_of_two(heads // kv_heads)
    queries = tiles.rows // padded
    triton_kernels.prefill[(kv_heads, size.tokens // queries + size.prefills)](
        q,
        out,
        keys,
        values,
        tables,
        fields.row_seat[size.decodes :],
        fields.length[size.decodes :],
        fields.start,
        size.prefills,
        _scale(dim),
        keys.stride(0),
        keys.stride(1),
        tables.stride(0),
        QUERIES=queries,
        **_sizes(heads, kv_heads, keys, padded),
        **_build(tiles),
    )


def _scale(dim: int) -> float:
    return math.log2(math.e) / math.sqrt(dim)


def _sizes(heads: int, kv_heads: int, keys: torch.Tensor, padded: int) -> dict[str, int]:
    return {
        "HEADS": heads,
        "GROUP": heads // kv_heads,
        "PADDED": padded,
        "D": keys.shape[3],
        "BLOCK_SIZE": keys.shape[1],
    }


def _build(tiles: Tiles) -> dict[str, Any]:
    return {"TILE": tiles.tile, "num_warps": tiles.warps, "num_stages": tiles.stages}
