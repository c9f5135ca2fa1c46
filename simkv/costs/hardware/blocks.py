"""How many KV blocks fit on a GPU, as its engine finds it: what its share of memory leaves over.

vLLM runs the largest batch once and takes what then remains of ``gpu_memory_utilization``. That run
is estimated here from the shapes that it holds at its peak, in bytes:

- the MLP: per token of ``max_num_batched_tokens`` three vectors of the MLP's width (gate, up and
  their product) and three of the hidden size, 2 bytes a number;
- or the sampler: per sequence of ``max_num_seqs`` the logits in 16 and in 32 bits, sorted, their
  indices, probabilities and running sum: 26 bytes per word of the vocabulary;
- whichever is larger, and ``OUTSIDE_TORCH`` for the CUDA context and libraries.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from simkv.costs.hardware.architecture import Dense, Gqa
from simkv.costs.hardware.hardware import Hardware
from simkv.costs.hardware.memory import kv_bytes, weight_bytes
from simkv.costs.hardware.setting import EngineSetting

#: Bytes that CUDA and its libraries take beside the tensors of torch.
OUTSIDE_TORCH = 300_000_000
#: Bytes per sequence and word of the vocabulary at the peak of vLLM's sampler.
SAMPLER_BYTES = 26


@dataclass(frozen=True)
class KvRoom:
    """What a GPU's share of memory is spent on, in bytes, and the blocks that are left.

    ``block_bytes`` are those of one block over all layers that keep KV.
    """

    hardware: Hardware
    usable: int
    weights: int
    activations: int
    outside: int
    block_bytes: int

    @property
    def num_gpu_blocks(self) -> int:
        """Whole blocks; 0 if not even the weights fit."""
        rest = self.usable - self.weights - self.activations - self.outside
        return max(rest // self.block_bytes, 0)

    @property
    def refusal(self) -> str:
        """Why there is no room."""
        gpus = f"{self.hardware.gpus} x {self.hardware.gpu.name}"
        return (
            f"{self.hardware.architecture.name} does not fit on {gpus}: of "
            f"{self.usable / 1e9:.1f} GB that each may use weights take {self.weights / 1e9:.1f} "
            f"and the largest step {(self.activations + self.outside) / 1e9:.1f}"
        )


def kv_room(hardware: Hardware, setting: EngineSetting) -> KvRoom:
    """The blocks of ``setting.block_size`` tokens that the engine would find on each GPU."""
    share = setting.memory_share or 0.9
    return KvRoom(
        hardware=hardware,
        usable=int(hardware.gpu.memory_bytes * share),
        weights=weight_bytes(hardware),
        activations=_activations(hardware, setting),
        outside=OUTSIDE_TORCH,
        block_bytes=block_bytes(hardware, setting),
    )


def block_bytes(hardware: Hardware, setting: EngineSetting) -> int:
    """Bytes of one block as vLLM counts them.

    Layers with a window and layers without take blocks of their own from one pool, in groups of
    equally many layers; a block is of one group (vllm/v1/core/kv_cache_utils.py).
    """
    kept = [part for part in hardware.architecture.layers if kv_bytes(part.attention, hardware)]
    windows = {part.attention.window for part in kept if isinstance(part.attention, Gqa)}
    if len(windows) < 2:
        per_token = sum(part.count * kv_bytes(part.attention, hardware) for part in kept)
        return int(per_token * setting.block_size)
    counts = [
        sum(p.count for p in kept if isinstance(p.attention, Gqa) and p.attention.window == window)
        for window in windows
    ]
    return int(gcd(*counts) * kv_bytes(kept[0].attention, hardware) * setting.block_size)


def _activations(hardware: Hardware, setting: EngineSetting) -> int:
    """Bytes at the peak of the largest step."""
    model = hardware.architecture
    dense = [part.mlp.intermediate for part in model.layers if isinstance(part.mlp, Dense)]
    width = max(dense, default=0) // hardware.tp
    mlp = setting.max_num_batched_tokens * 2 * 3 * (width + model.hidden)
    sampler = setting.max_num_seqs * model.vocab * SAMPLER_BYTES
    return max(mlp, sampler)
