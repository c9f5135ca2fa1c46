"""Build parameters of the attention kernels for a device.

choose_tiles("decode", 128, 2, arch=90, device="NVIDIA H100 80GB HBM3")

The candidates compile without spills for Ampere, Ada, Hopper and small Blackwell GPUs and fit into
their shared memory (see tests/gpu/compile_kernels.py). Other architectures use the same candidates,
untested. The first candidate is the default; an entry in ``tiles.json`` replaces the default of a
device. `calibrate/on-gpu.sh smoke` measures all candidates on a real device. Kernels are never
tuned during a run.
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
#: Bytes of shared memory available to a program, for the architectures for which the tests compile.
SHARED_MEMORY_BYTES = {80: 166912, 86: 101376, 89: 101376, 90: 232448, 120: 101376}


class Tiles(NamedTuple):
    """Build parameters of a kernel: KV tokens per tile, rows per tile, warps, stages.

    For decodes, ``rows`` is the minimum height of a matrix operand. For prefills, ``rows`` is the
    number of queries times the number of query heads per key-value head.
    """

    tile: int
    rows: int
    warps: int
    stages: int


#: Three stages leave only one buffer for the next tile; two buffers need at least five stages.
DECODES = (Tiles(32, 16, 4, 5), Tiles(64, 16, 4, 5), Tiles(64, 16, 4, 3))
PREFILLS_HOPPER = (Tiles(64, 128, 8, 5), Tiles(64, 128, 8, 3), Tiles(32, 128, 8, 3))
#: Candidates for all other architectures: at most 101,376 bytes of shared memory.
PREFILLS = (Tiles(64, 128, 8, 3), Tiles(32, 128, 8, 3), Tiles(32, 64, 4, 3))
#: Candidates for float32, which is used only for checks: numbers have twice the bytes, so tiles are
#: smaller or there are more warps.
FLOAT32_TILES = {"decode": Tiles(64, 16, 4, 3), "prefill": Tiles(16, 32, 8, 2)}
#: Candidates for heads with fewer than 64 dimensions, which only the tiny model has.
SMALL_HEAD_TILES = {"decode": Tiles(32, 16, 4, 3), "prefill": Tiles(32, 64, 4, 2)}

_tried: dict[AttentionKernel, Tiles] = {}


def candidates(kernel: AttentionKernel, head_dim: int, itemsize: int, arch: int) -> Sequence[Tiles]:
    """Return the candidate tile configurations of a kernel. The first is the default."""
    if head_dim < 64:
        return (SMALL_HEAD_TILES[kernel],)
    if itemsize > 2:
        return (FLOAT32_TILES[kernel],)
    if kernel == "decode":
        return DECODES
    return PREFILLS_HOPPER if 90 <= arch < 100 else PREFILLS


def choose_tiles(
    kernel: AttentionKernel, head_dim: int, itemsize: int, *, arch: int, device: str = ""
) -> Tiles:
    """Return the tile configuration of a kernel for a device: the fastest measured one, or the
    default.
    """
    if kernel in _tried:
        return _tried[kernel]
    found = candidates(kernel, head_dim, itemsize, arch)
    if len(found) > 1 and (given := measured_tiles().get(device, {}).get(f"{kernel} {head_dim}")):
        return Tiles(*given)
    return found[0]


@contextmanager
def override_tiles(kernel: AttentionKernel, tiles: Tiles) -> Iterator[None]:
    """Context in which the kernel is built with ``tiles``, regardless of other settings."""
    _tried[kernel] = tiles
    try:
        yield
    finally:
        del _tried[kernel]


@lru_cache(maxsize=1)
def measured_tiles() -> Mapping[str, Mapping[str, Sequence[int]]]:
    """Return the fastest measured tile configurations, by device name and ``<kernel>
    <head_dim>``.
    """
    found: dict[str, dict[str, list[int]]] = json.loads(
        MEASURED_TILES_FILE.read_text(encoding="utf-8")
    )
    return found
