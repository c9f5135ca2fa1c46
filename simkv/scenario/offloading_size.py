"""``kv_offloading_size`` in an engine's section: blocks in host memory by their bytes.

engine: {name: vllm, num_gpu_blocks: auto, kv_offloading_size: 64}

GiB of the whole engine, as ``--kv-offloading-size`` has it (``vllm/v1/kv_offload/cpu/spec.py``): a
block takes what the GPUs of a tensor-parallel group keep of it together, in whole pages of memory.
A latent is whole on each of them, and from 0.27 on in host memory once.
"""

from __future__ import annotations

import re
from math import ceil
from typing import Any

from simkv.core.engine_spec import EngineSpec
from simkv.core.errors import InputError
from simkv.core.scheduler_protocol import MAX_BLOCKS
from simkv.costs.hardware.architecture import Mla
from simkv.costs.hardware.kv_capacity import KvCapacity

SIZE, BACKEND = "kv_offloading_size", "kv_offloading_backend"
GIB = 1 << 30
PAGE = 4096
#: The release from which on a latent that is whole on each GPU is kept once.
SINGLE_COPY_SINCE = (0, 27)


def host_blocks(
    spec: EngineSpec, engine: dict[str, Any], offload: Any, room: KvCapacity | None
) -> dict[str, int]:
    """The knob with the blocks that the size in GiB of an ``engine`` section makes.

    Bytes of a block are those of ``room`` where there is hardware, else of the scenario's
    ``offload`` section. Raises InputError for a size that is none, beside a number of blocks, or of
    another backend than vLLM's own.
    """
    knob, size = spec.host_blocks, engine[SIZE]
    if knob in engine:
        raise InputError(f"{knob} says the same in blocks; give one of them")
    if isinstance(size, bool) or not isinstance(size, int | float) or not size > 0:
        raise InputError(f"{size!r} should be GiB of host memory, above 0")
    if (backend := engine.get(BACKEND, "native")) != "native":
        raise InputError(f"{BACKEND} {backend!r} is not modelled; say native")
    if room:
        variant = str(engine.get("variant", spec.config().variant))
        block = room.block_bytes * _copies(room, variant)
    else:
        told = offload.get("bytes_per_token") if isinstance(offload, dict) else None
        if not isinstance(told, int | float):
            raise InputError(
                "bytes of a block follow from hardware, or from offload.bytes_per_token; give "
                f"one of them, or {knob}"
            )
        tokens = engine.get(spec.block, getattr(spec.config(), spec.block))
        block = ceil(told * tokens)
    pages = -(-block // PAGE) * PAGE
    blocks = min(int(size * GIB) // pages, MAX_BLOCKS)
    if not blocks:
        raise InputError(f"{size} GiB are less than a block, which takes {pages} bytes")
    return {str(knob): blocks}


def _copies(room: KvCapacity, variant: str) -> int:
    """How often a block's bytes on one GPU are kept in host memory."""
    release = tuple(int(part) for part in re.findall(r"\d+", variant)[:2])
    latent = any(isinstance(part.attention, Mla) for part in room.hardware.architecture.layers)
    return 1 if latent and release >= SINGLE_COPY_SINCE else room.hardware.tp
