"""Speed of the attention kernels and of whole steps, relative to the device's peak rates.

    for reading in bench(MODEL_SHAPES["llama-3-8b"], SIZES, "cuda"):
        print(reading)

Attention is computed for all layers, so that keys and values are not read from the device's cache.
Each byte of KV counts once. Each head, dimension and pair of tokens counts as four FLOPs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from statistics import median
from typing import NamedTuple

import torch

from simkv.costs.hardware.model_shape import ModelShape
from simkv.costs.step_load import count_attention_pairs
from simkv.gpu.campaign_plan import Limits, Probe
from simkv.gpu.device_memory import release_memory
from simkv.gpu.machine_info import ceilings
from simkv.gpu.microbenchmark import Microbenchmark, WithAttention
from simkv.gpu.triton_tile_configs import (
    AttentionKernel,
    Tiles,
    candidates,
    override_tiles,
)
from simkv.gpu.varlen_baseline import VarlenAttention, find_varlen

#: 64 rows with 4,096 tokens of context, and a prompt of 4,096 tokens.
SIZES = Limits(decodes=64, tokens=4096, context=4096, kv_tokens=64 * 4112 + 8192)
SMALL_SIZES = Limits(decodes=8, tokens=128, context=128, kv_tokens=4096)


def sizes_for(kv_tokens: int, sizes: Limits = SIZES) -> Limits:
    """Return ``sizes`` for a pool of ``kv_tokens`` KV tokens, if necessary with fewer decodes."""
    rows = (kv_tokens - 2 * sizes.tokens) // (sizes.context + sizes.block_size)
    return replace(sizes, decodes=max(min(sizes.decodes, rows), 1), kv_tokens=kv_tokens)


class Reading(NamedTuple):
    """A measured rate. ``ceiling`` is the device's peak rate, or None."""

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
    """Yield the device's peak rates, then the rates of attention, whole steps and torch's
    attention.

    Steps run for ``warm_up`` seconds before the measurements.
    """
    release_memory(device)
    top = ceilings(device)
    yield Reading("copy on the device, read and written", top.bytes_per_s / 1e9, "GB/s")
    yield Reading("copy from the host", top.host_bytes_per_s / 1e9, "GB/s")
    yield Reading("matrix product", top.flops_per_s / 1e12, "TFLOP/s")
    release_memory(device)
    made = Microbenchmark(shape, sizes, device)
    made.runner.warm_up(warm_up)
    itemsize = made.runner.pool.blocks.element_size()
    for rows in sorted({1, sizes.decodes}):
        point = Probe("decode", (sizes.context,) * rows)
        moved = rows * sizes.context * shape.kv_bytes_per_token(itemsize)
        rate = moved / median(made.time(point, repeats)) / 1e9
        what = f"decode attention, {rows} x {sizes.context}"
        yield Reading(what, rate, "GB/s", top.bytes_per_s / 1e9)
    point = Probe("prefill", (), ((sizes.tokens, 0),))
    rate = _flops(shape, sizes.tokens) / median(made.time(point, repeats)) / 1e12
    what = f"prefill attention, {sizes.tokens}"
    yield Reading(what, rate, "TFLOP/s", top.flops_per_s / 1e12)
    yield from _steps(made, shape, itemsize, repeats, top.bytes_per_s)
    if made.on_gpu and (attention := find_varlen()):
        yield from compare_attention(made, VarlenAttention(attention), repeats=repeats)


def _steps(
    made: Microbenchmark, shape: ModelShape, itemsize: int, repeats: int, bytes_per_s: float
) -> Iterator[Reading]:
    """Yield the speed of whole steps with hardly any KV, relative to the time of reading the
    weights.
    """
    floor = 1e3 * shape.step_weights * itemsize / bytes_per_s
    for rows in (1, made.limits.decodes):
        taken = 1e3 * median(made.time(Probe("step", (16,) * rows), repeats))
        yield Reading(f"a step of {rows} rows over the time of its weights", taken / floor, "x")


def time_tiles(
    shape: ModelShape, sizes: Limits, device: str, *, repeats: int = 20
) -> Iterator[tuple[AttentionKernel, Tiles, Reading]]:
    """Measure the time of attention with each candidate tile configuration.

    Yields nothing on a CPU.
    """
    made = Microbenchmark(shape, sizes, device)
    if not made.on_gpu:
        return
    major, minor = torch.cuda.get_device_capability(device)
    itemsize = made.runner.pool.blocks.element_size()
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
    """Return the ``tiles.json`` entry of a device: the fastest tiles by kernel and head size."""
    best: dict[str, tuple[float, Tiles]] = {}
    for kernel, tiles, reading in readings:
        name = f"{kernel} {head_dim}"
        if name not in best or reading.value > best[name][0]:
            best[name] = (reading.value, tiles)
    return {name: tiles for name, (_, tiles) in best.items()}


def compare_attention(
    made: Microbenchmark, other: VarlenAttention, *, repeats: int = 20
) -> Iterator[Reading]:
    """Yield the rate of another library's prefill attention, and the difference between both
    outputs.
    """
    shape, tokens = made.model.shape, made.limits.tokens
    point = Probe("prefill", (), ((tokens, 0),))
    ours, made.model.ops = made.model.ops, WithAttention(made.model.ops, other.attend)
    try:
        error = made.difference(point, ours, made.model.ops)
        made.forget()
        taken = median(made.time(point, repeats))
    finally:
        made.model.ops = ours
    yield Reading(f"{other.name}, {tokens}", _flops(shape, tokens) / taken / 1e12, "TFLOP/s")
    yield Reading(f"{other.name}: difference to ours", error, "relative")


def _flops(shape: ModelShape, tokens: int) -> float:
    return 4.0 * count_attention_pairs(tokens, 0) * shape.layers * shape.heads * shape.head_dim
