"""Tokens of KV that a replica has, from the memory that its engine may take."""

from __future__ import annotations

from simkv.core.execution_settings import ExecutionSettings
from simkv.costs.hardware.kv_capacity import compute_kv_capacity
from simkv.costs.hardware.replica_hardware import Hardware


def kv_tokens(hardware: Hardware, setting: ExecutionSettings) -> int:
    """Tokens of KV of each GPU; 0 if not even the weights fit.

    SGLang's share of the memory is for weights and KV alone, vLLM's for the largest step too.
    """
    room = compute_kv_capacity(hardware, setting)
    rest = room.usable - room.weights
    if setting.engine == "vllm":
        rest -= room.activations + room.outside
    return max(rest // room.block_bytes, 0) * room.block_size
