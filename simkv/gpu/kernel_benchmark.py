"""Compare kernels with the device's ceilings: a first check of a new GPU.

    for row in bench(MODEL_SHAPES["llama-3-8b"], SIZES, "cuda"):
        print(row.what, row.value, row.unit, row.ceiling)
    tiles = fastest(time_tiles(MODEL_SHAPES["llama-3-8b"], SIZES, "cuda"), head_dim=128)
    fa3 = FlashAttention3(path)
    rows = list(compare_attention(fa3, MODEL_SHAPES["llama-3-8b"], SIZES, "cuda"))

Attention runs through all layers of the model, so keys and values come from the device's memory and
not from its cache. Bytes and FLOPs are computed: each byte of KV once, four FLOPs per head,
dimension and pair of tokens.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from statistics import median
from typing import NamedTuple

import torch

from simkv.costs.hardware.model_shape import ModelShape
from simkv.costs.step_load import count_attention_pairs
from simkv.gpu.campaign_plan import Limits, Probe
from simkv.gpu.fa3_baseline import FlashAttention3
from simkv.gpu.kv_pool import Layout
from simkv.gpu.machine_info import Ceilings, ceilings
from simkv.gpu.microbenchmark import Microbenchmark, WithAttention
from simkv.gpu.triton_tile_configs import (
    AttentionKernel,
    Tiles,
    candidates,
    override_tiles,
)

#: 64 rows with 4,096 tokens of context, and a prompt of 4,096 tokens.
SIZES = Limits(decodes=64, tokens=4096, context=4096, kv_tokens=64 * 4112 + 8192)
SMALL_SIZES = Limits(decodes=8, tokens=128, context=128, kv_tokens=4096)


class Reading(NamedTuple):
    """A measurement; ``ceiling`` is the device's maximum, or None."""

    what: str
    value: float
    unit: str
    ceiling: float | None = None

    def __str__(self) -> str:
        share = "" if not self.ceiling else f"   {100 * self.value / self.ceiling:5.1f} % of"
        top = "" if not self.ceiling else f" {self.ceiling:,.4g} {self.unit}"
        return f"{self.what:<44}{self.value:>12,.4g} {self.unit}{share}{top}"


def bench(
    shape: ModelShape,
    sizes: Limits,
    device: str,
    *,
    repeats: int = 20,
    warm_up: float = 0.0,
) -> Iterator[Reading]:
    """Yield the ceilings, attention in both layouts of the pool, and steps.

    ``warm_up`` seconds of steps bring the device to its working clocks before any timing.
    """
    Microbenchmark(shape, sizes, device).runner.warm_up(warm_up)
    _release(device)
    top = ceilings(device)
    yield Reading("copy on the device, read and written", top.bytes_per_s / 1e9, "GB/s")
    yield Reading("copy from the host", top.host_bytes_per_s / 1e9, "GB/s")
    yield Reading("matrix product", top.flops_per_s / 1e12, "TFLOP/s")
    layouts: tuple[Layout, ...] = ("layer", "block")
    for layout in layouts:
        yield from _of_layout(Microbenchmark(shape, sizes, device, layout), layout, top, repeats)
        _release(device)


def _of_layout(
    made: Microbenchmark, layout: Layout, top: Ceilings, repeats: int
) -> Iterator[Reading]:
    """Yield attention over a pool of this layout; for the block layout, whole steps, too."""
    shape, sizes = made.model.shape, made.limits
    itemsize = made.runner.pool.data.element_size()
    for rows in (1, sizes.decodes):
        point = Probe("decode", (sizes.context,) * rows)
        moved = rows * sizes.context * shape.kv_bytes_per_token(itemsize)
        rate = moved / median(made.time(point, repeats)) / 1e9
        what = f"decode attention, {rows} x {sizes.context}, {layout} layout"
        yield Reading(what, rate, "GB/s", top.bytes_per_s / 1e9)
    point = Probe("prefill", (), ((sizes.tokens, 0),))
    rate = _flops(shape, sizes.tokens) / median(made.time(point, repeats)) / 1e12
    what = f"prefill attention, {sizes.tokens}, {layout} layout"
    yield Reading(what, rate, "TFLOP/s", top.flops_per_s / 1e12)
    if layout == "block":
        yield from _steps(made, shape, itemsize, repeats, top.bytes_per_s)


def _release(device: str) -> None:
    """Release memory that is no longer referenced."""
    gc.collect()
    if torch.device(device).type == "cuda":
        torch.cuda.empty_cache()


def _steps(
    made: Microbenchmark, shape: ModelShape, itemsize: int, repeats: int, bytes_per_s: float
) -> Iterator[Reading]:
    """Yield whole steps with hardly any KV, relative to the time of reading the weights."""
    floor = 1e3 * shape.step_weights * itemsize / bytes_per_s
    for rows in (1, made.limits.decodes):
        taken = 1e3 * median(made.time(Probe("step", (16,) * rows), repeats))
        yield Reading(f"a step of {rows} rows over the time of its weights", taken / floor, "x")


def time_tiles(
    shape: ModelShape, sizes: Limits, device: str, *, repeats: int = 20
) -> Iterator[tuple[AttentionKernel, Tiles, Reading]]:
    """Time attention with each candidate tile configuration; see triton_tile_configs.py.

    Yields nothing on a CPU, whose operations have no tiles.
    """
    made = Microbenchmark(shape, sizes, device)
    if not made.on_gpu:
        return
    major, minor = torch.cuda.get_device_capability(device)
    itemsize = made.runner.pool.data.element_size()
    decodes = Probe("decode", (sizes.context,) * sizes.decodes)
    moved = sizes.decodes * sizes.context * shape.kv_bytes_per_token(itemsize) / 1e9
    prompt = Probe("prefill", (), ((sizes.tokens, 0),))
    flops = _flops(shape, sizes.tokens) / 1e12
    kinds: tuple[tuple[AttentionKernel, Probe, float, str], ...] = (
        ("decode", decodes, moved, "GB/s"),
        ("prefill", prompt, flops, "TFLOP/s"),
    )
    for kernel, point, work, unit in kinds:
        for tiles in candidates(kernel, shape.head_dim, itemsize, 10 * major + minor):
            made.forget()
            with override_tiles(kernel, tiles):
                taken = median(made.time(point, repeats))
            yield kernel, tiles, Reading(f"{kernel} with {tiles}", work / taken, unit)


def fastest(
    readings: Iterable[tuple[AttentionKernel, Tiles, Reading]], head_dim: int
) -> dict[str, Tiles]:
    """Return the ``tiles.json`` entry of a device: fastest tiles by kernel and head size."""
    best: dict[str, tuple[float, Tiles]] = {}
    for kernel, tiles, reading in readings:
        name = f"{kernel} {head_dim}"
        if name not in best or reading.value > best[name][0]:
            best[name] = (reading.value, tiles)
    return {name: tiles for name, (_, tiles) in best.items()}


def compare_attention(
    anchor: FlashAttention3, shape: ModelShape, sizes: Limits, device: str, *, repeats: int = 20
) -> Iterator[Reading]:
    """Compare with attention of another library: its rate, and its numerical difference."""
    made = Microbenchmark(shape, sizes, device)
    itemsize = made.runner.pool.data.element_size()
    ours, made.model.ops = made.model.ops, WithAttention(made.model.ops, anchor.attend)
    for point in (
        Probe("decode", (sizes.context,) * sizes.decodes),
        Probe("prefill", (), ((sizes.tokens, 0),)),
    ):
        error = made.difference(point, ours, made.model.ops)
        made.forget()
        taken = median(made.time(point, repeats))
        if point.part == "decode":
            moved = sizes.decodes * sizes.context * shape.kv_bytes_per_token(itemsize)
            yield Reading(f"{anchor.name}: decode attention", moved / taken / 1e9, "GB/s")
        else:
            rate = _flops(shape, sizes.tokens) / taken / 1e12
            yield Reading(f"{anchor.name}: prefill attention", rate, "TFLOP/s")
        yield Reading(f"{anchor.name}: difference to ours, {point.part}", error, "relative")
    made.model.ops = ours


def _flops(shape: ModelShape, tokens: int) -> float:
    return 4.0 * count_attention_pairs(tokens, 0) * shape.layers * shape.heads * shape.head_dim
