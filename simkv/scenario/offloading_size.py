"""Convert ``kv_offloading_size`` (GiB) of an engine section into host memory blocks.

engine: {name: vllm, num_gpu_blocks: auto, kv_offloading_size: 64}

The size applies to the whole engine, as for ``--kv-offloading-size``
(``vllm/v1/kv_offload/cpu/spec.py``). A block in host memory contains the KV of all GPUs of a
tensor-parallel group, rounded up to whole memory pages. With latent KV (MLA), each GPU stores a
complete copy; host memory stores all copies before 0.27, and one copy since 0.27.
"""

from __future__ import annotations

import re
from math import ceil
from typing import Any

from simkv.core.engine_spec import EngineSpec
from simkv.core.errors import InputError
from simkv.core.scheduler_protocol import MAX_BLOCKS
from simkv.costs.hardware.kv_capacity import KvCapacity
from simkv.costs.hardware.model_architecture import Mla

SIZE, BACKEND = "kv_offloading_size", "kv_offloading_backend"
#: Size of the KV cache of a GPU in bytes, in place of a number of blocks.
CACHE_BYTES = "kv_cache_memory_bytes"
GIB = 1 << 30
PAGE = 4096
#: First release that stores a single copy of latent KV (MLA) in host memory.
SINGLE_COPY_SINCE = (0, 27)


def host_blocks(
    spec: EngineSpec, engine: dict[str, Any], offload: Any, room: KvCapacity | None
) -> dict[str, int]:
    """Return the setting for host blocks: the number of blocks that fit into the size in GiB.

    ``room`` gives the size of a block; without it, the ``offload`` section does. Raises InputError
    if the size is invalid, if the number of blocks is also set, or if the backend is not vLLM's
    native one.
    """
    knob, size = spec.host_blocks, engine[SIZE]
    if knob in engine:
        raise InputError(f"{knob} sets the same size in blocks; set only one of the two")
    if isinstance(size, bool) or not isinstance(size, int | float) or not size > 0:
        raise InputError(f"must be a number of GiB greater than 0, got {size!r}")
    if (backend := engine.get(BACKEND, "native")) != "native":
        raise InputError(
            f"{BACKEND}: must be native, got {backend!r}; other backends are not modelled"
        )
    if room:
        variant = str(engine.get("variant", spec.config().variant))
        block = room.block_bytes * _copies(room, variant)
    else:
        told = offload.get("bytes_per_token") if isinstance(offload, dict) else None
        if not isinstance(told, int | float):
            raise InputError(
                "requires the size of a block: set hardware or offload.bytes_per_token, or set "
                f"{knob} instead"
            )
        tokens = engine.get(spec.block, getattr(spec.config(), spec.block))
        block = ceil(told * tokens)
    pages = -(-block // PAGE) * PAGE
    blocks = min(int(size * GIB) // pages, MAX_BLOCKS)
    if not blocks:
        raise InputError(f"{size} GiB is less than the size of one block ({pages} bytes)")
    return {str(knob): blocks}


def _copies(room: KvCapacity, variant: str) -> int:
    """Return the number of copies of a block in host memory."""
    release = tuple(int(part) for part in re.findall(r"\d+", variant)[:2])
    latent = any(isinstance(part.attention, Mla) for part in room.hardware.architecture.layers)
    return 1 if latent and release >= SINGLE_COPY_SINCE else room.hardware.tp
