"""Memory of a model on each of its GPUs: weights, KV per token, and recurrent states."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from simkv.costs.hardware.model_architecture import (
    Attention,
    Gqa,
    LayerSpec,
    Mla,
    MoeMlp,
    Recurrent,
)
from simkv.costs.hardware.number_formats import find_number_format
from simkv.costs.hardware.replica_hardware import Hardware

#: Bytes per KV number; nvfp4 includes an 8-bit scale for each 16 numbers.
KV_BYTES = {"bf16": 2.0, "fp8": 1.0, "nvfp4": 0.5 + 1 / 16}
#: Additional bytes of the sparse indexer's key per token and layer: a 32-bit scale
#: (vllm/v1/attention/backends/mla/indexer.py).
INDEX_SCALE_BYTES = 4
#: Bytes of a token's latent per layer with fp8 KV and sparse attention: 512 8-bit numbers, four
#: 32-bit scales and 64 16-bit rotary numbers (vLLM's ``fp8_ds_mla``).
SPARSE_FP8_TOKEN_BYTES = 656


class ExpertPadding(NamedTuple):
    """Padding of experts.

    The expert width on one GPU is rounded up to a multiple of ``width``, and the hidden size to a
    multiple of ``hidden``.
    """

    width: int = 1
    hidden: int = 1

    def apply(self, mlp: MoeMlp, hidden: int, expert_tp: int) -> int:
        """Return the number of parameters of all experts with padding."""
        width = expert_tp * _round_up(mlp.intermediate // expert_tp, self.width)
        return replace(mlp, intermediate=width).expert_weights(_round_up(hidden, self.hidden))


def _round_up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def weight_bytes(hardware: Hardware, padding: ExpertPadding | None = None) -> int:
    """Return the bytes of weights per GPU, with ``padding`` of the experts.

    Embedding, output head, router and norms have 16 bits per number.
    """
    model, padding = hardware.architecture, padding or ExpertPadding()
    norms = 2 * (2 * model.depth + 1) * model.hidden
    layers = sum(part.count * _layer(part, hardware, padding) for part in model.layers)
    return int(norms + 2 * model.embeddings / hardware.tp + layers)


def _layer(part: LayerSpec, hardware: Hardware, padding: ExpertPadding) -> float:
    hidden = hardware.architecture.hidden
    attention = find_number_format(hardware.attention).bytes * _attention(
        part.attention, hardware, hidden
    )
    dense = find_number_format(hardware.weights).bytes
    if not isinstance(part.mlp, MoeMlp):
        return attention + dense * part.mlp.weights(hidden) / hardware.tp
    numbers = padding.apply(part.mlp, hidden, hardware.expert_tp)
    experts = find_number_format(hardware.experts).bytes * numbers
    shared = dense * part.mlp.shared_weights(hidden) / hardware.tp
    router = 2 * hidden * part.mlp.experts
    return attention + experts / hardware.gpus + shared + router


def _attention(attention: Attention, hardware: Hardware, hidden: int) -> float:
    """Return the number of attention parameters per layer and GPU.

    KV heads are replicated if there are fewer heads than tensor-parallel GPUs.
    """
    if isinstance(attention, Mla):
        split = attention.split_weights(hidden) / hardware.tp
        return attention.shared_weights(hidden) + split
    if isinstance(attention, Recurrent):
        return attention.weights(hidden) / hardware.tp
    kv_heads = max(attention.kv_heads, hardware.tp)
    whole = Gqa(attention.heads, kv_heads, attention.head_dim, 0, attention.output_gate)
    return whole.weights(hidden) / hardware.tp


def kv_bytes(attention: Attention, hardware: Hardware) -> float:
    """Return the KV bytes per token, layer and GPU; 0 for a layer with a recurrent state.

    KV heads are split across tensor-parallel GPUs, and latent KV is replicated.
    """
    number = KV_BYTES[hardware.kv]
    if isinstance(attention, Recurrent):
        return 0.0
    if isinstance(attention, Gqa):
        heads = max(attention.kv_heads // hardware.tp, 1)
        return 2 * heads * attention.head_dim * number
    if not attention.sparse:
        return attention.latent_width * number
    latent = SPARSE_FP8_TOKEN_BYTES if hardware.kv == "fp8" else attention.latent_width * number
    return latent + attention.sparse.head_dim + INDEX_SCALE_BYTES


def state_bytes(attention: Attention, hardware: Hardware) -> float:
    """Return the bytes of a sequence's recurrent state per layer and GPU; 0 for attention with
    KV.
    """
    return attention.state_bytes(hardware.tp) if isinstance(attention, Recurrent) else 0.0
