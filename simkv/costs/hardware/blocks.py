"""How many KV blocks fit on a GPU, as vLLM finds it: what its share of memory leaves over.

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

from simkv.core.errors import InputError
from simkv.costs.hardware.catalog import Gpu, Model

#: Bytes that CUDA and its libraries take beside the tensors of torch.
OUTSIDE_TORCH = 300_000_000
#: Bytes per sequence and word of the vocabulary at the peak of vLLM's sampler.
SAMPLER_BYTES = 26


@dataclass(frozen=True)
class KvRoom:
    """What a GPU's share of memory is spent on, in bytes, and the blocks that are left."""

    usable: int
    weights: int
    activations: int
    block_bytes: int

    @property
    def num_gpu_blocks(self) -> int:
        """Whole blocks; 0 if not even the weights fit."""
        rest = self.usable - self.weights - self.activations - OUTSIDE_TORCH
        return max(rest // self.block_bytes, 0)


def kv_blocks(
    model: Model,
    gpu: Gpu,
    *,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    block_size: int = 16,
    gpu_memory_utilization: float = 0.9,
    tensor_parallel: int = 1,
    expert_ranks: int = 1,
) -> KvRoom:
    """The blocks of ``block_size`` tokens that vLLM would find on each of the GPUs.

    ``expert_ranks`` GPUs share the experts of a mixture, if there is one. Raises InputError for a
    number of GPUs that cannot share the heads.
    """
    if model.heads % tensor_parallel:
        raise InputError(
            f"{model.name}: {model.heads} heads cannot be shared by {tensor_parallel} GPUs"
        )
    width, hidden = model.intermediate // tensor_parallel, model.hidden
    mlp = max_num_batched_tokens * model.itemsize * 3 * (width + hidden)
    sampler = max_num_seqs * model.vocab * SAMPLER_BYTES
    kv_heads = max(model.kv_heads // tensor_parallel, 1)
    per_token = model.kv_bytes_per_token // model.kv_heads * kv_heads
    return KvRoom(
        usable=int(gpu.memory_bytes * gpu_memory_utilization),
        weights=model.weight_bytes(tensor_parallel, expert_ranks),
        activations=max(mlp, sampler),
        block_bytes=block_size * per_token,
    )
