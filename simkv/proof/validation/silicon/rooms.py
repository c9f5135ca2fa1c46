"""Tokens of KV that a replica has, from the memory that its engine may take."""

from __future__ import annotations

from simkv.core.setting import EngineSetting
from simkv.costs.hardware.blocks import kv_room
from simkv.costs.hardware.hardware import Hardware


def kv_tokens(hardware: Hardware, setting: EngineSetting) -> int:
    """Tokens of KV of each GPU; 0 if not even the weights fit.

    SGLang's share of the memory is for weights and KV alone, vLLM's for the largest step too.
    """
    room = kv_room(hardware, setting)
    rest = room.usable - room.weights
    if setting.engine == "vllm":
        rest -= room.activations + room.outside
    return max(rest // room.block_bytes, 0) * room.block_size
