"""KV cache capacity in tokens of a replica, from the memory available to its engine."""

from __future__ import annotations

from simkv.core.execution_settings import ExecutionSettings
from simkv.costs.hardware.kv_capacity import compute_kv_capacity
from simkv.costs.hardware.replica_hardware import Hardware


def kv_tokens(hardware: Hardware, setting: ExecutionSettings) -> int:
    """Return the number of tokens whose KV fits on each GPU, or 0 if the weights do not fit.

    The memory fraction of SGLang covers weights and KV only. The fraction of vLLM also covers the
    activations of the largest step.
    """
    room = compute_kv_capacity(hardware, setting)
    rest = room.usable - room.weights
    if setting.engine == "vllm":
        rest -= room.activations + room.outside
    return max(rest // room.block_bytes, 0) * room.block_size
