"""Build parameters of the attention kernels for a device.

    choose_tiles("decode", 128, 2, arch=90, device="NVIDIA H100 80GB HBM3")

Candidates by architecture compile without spills and fit into its shared memory (see
tests/gpu/compile_kernels.py); the first one is the default. ``gpu bench`` tries all candidates on a
real device and reports the fastest; an entry in ``tiles.json`` beside this file then replaces the
default on that device. Nothing is tuned while a step runs or is captured.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Literal, NamedTuple

AttentionKernel = Literal["decode", "prefill"]
MEASURED_TILES_FILE = Path(__file__).with_name("tiles.json")
#: Bytes of shared memory available to a program, by architecture.
SHARED_MEMORY_BYTES = {80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448, 120: 101376}


class Tiles(NamedTuple):
    """Build parameters of a kernel: KV tokens per tile, rows per tile, warps, stages.

    ``rows`` is the minimum height of a matrix operand for decodes, and queries times heads of the
    group for prefills.
    """

    tile: int
    rows: int
    warps: int
    stages: int


#: Three stages leave a single buffer for the next tile; two buffers need at least five.
DECODES = (Tiles(32, 16, 4, 5), Tiles(64, 16, 4, 5), Tiles(64, 16, 4, 3))
PREFILLS_LARGE = (Tiles(64, 128, 8, 5), Tiles(64, 128, 8, 3), Tiles(32, 128, 8, 3))
#: With Triton 3.6, five stages spill on Ampere if blocks have one token.
PREFILLS_AMPERE = (Tiles(64, 128, 8, 4), Tiles(64, 128, 8, 3), Tiles(32, 128, 8, 3))
PREFILLS_SMALL = (Tiles(64, 128, 8, 3), Tiles(32, 128, 8, 3), Tiles(32, 64, 4, 3))
#: On large Blackwell GPUs, tiles of 64 tokens spill with heads of 64 dimensions, others with larger
#: heads. With Triton 3.6, four warps spill, too, if blocks have one token.
PREFILLS_BLACKWELL = (Tiles(64, 128, 8, 5), Tiles(64, 128, 8, 3))
PREFILLS_BLACKWELL_64 = (Tiles(32, 128, 8, 5), Tiles(32, 128, 8, 3))
#: Float32, for checks only: twice the bytes, so smaller tiles or more warps.
FLOAT32_TILES = {"decode": Tiles(64, 16, 4, 3), "prefill": Tiles(16, 32, 8, 2)}
#: Heads of less than 64 dimensions, which only the tiny model has.
SMALL_HEAD_TILES = {"decode": Tiles(32, 16, 4, 3), "prefill": Tiles(32, 64, 4, 2)}

_tried: dict[AttentionKernel, Tiles] = {}


def candidates(kernel: AttentionKernel, head_dim: int, itemsize: int, arch: int) -> Sequence[Tiles]:
    """Return the candidates; the first is used unless another was measured as faster."""
    if head_dim < 64:
        return (SMALL_HEAD_TILES[kernel],)
    if itemsize > 2:
        return (FLOAT32_TILES[kernel],)
    if kernel == "decode":
        return DECODES
    if 100 <= arch < 120:
        return PREFILLS_BLACKWELL_64 if head_dim == 64 else PREFILLS_BLACKWELL
    if arch < 86:
        return PREFILLS_AMPERE
    return PREFILLS_LARGE if shared_memory(arch) > SHARED_MEMORY_BYTES[86] else PREFILLS_SMALL


def choose_tiles(
    kernel: AttentionKernel, head_dim: int, itemsize: int, *, arch: int, device: str = ""
) -> Tiles:
    """Return the tiles of a kernel on a device of this name."""
    if kernel in _tried:
        return _tried[kernel]
    found = candidates(kernel, head_dim, itemsize, arch)
    if len(found) > 1 and (given := measured_tiles().get(device, {}).get(f"{kernel} {head_dim}")):
        return Tiles(*given)
    return found[0]


@contextmanager
def override_tiles(kernel: AttentionKernel, tiles: Tiles) -> Iterator[None]:
    """Build this kernel with ``tiles`` inside the context, regardless of other settings."""
    _tried[kernel] = tiles
    try:
        yield
    finally:
        del _tried[kernel]


def shared_memory(arch: int) -> int:
    """Return the shared memory in bytes for the latest known architecture up to ``arch``."""
    known = [number for number in SHARED_MEMORY_BYTES if number <= arch]
    return SHARED_MEMORY_BYTES[max(known, default=min(SHARED_MEMORY_BYTES))]


@lru_cache(maxsize=1)
def measured_tiles() -> Mapping[str, Mapping[str, Sequence[int]]]:
    """Return the fastest measured tiles, by device name and ``<kernel> <head_dim>``."""
    found: dict[str, dict[str, list[int]]] = json.loads(
        MEASURED_TILES_FILE.read_text(encoding="utf-8")
    )
    return found
