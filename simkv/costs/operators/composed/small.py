"""Kernels that only move bytes: norms, activations, rotary positions, KV writes, the sampler.

Numbers have 2 bytes; engines fuse the quantising of the next product's input into norms and
activations. An RMS norm with its residual reads two vectors and writes two; the gated activation
reads two and writes one; rotary positions read and write queries and keys; the KV write reads keys
and values and writes them. The sampler turns logits into 32 bits (6 bytes a word) and reads them
(4); sampling with top-k or top-p, which sorts them, is not in it.
"""

from __future__ import annotations

from simkv.costs.hardware.architecture import Dense, GatedDelta, Gqa, Layers, Mamba, Moe
from simkv.costs.hardware.hardware import Hardware
from simkv.costs.operators.composed.part import Part
from simkv.costs.operators.operators import Operators


def small_kernels(operators: Operators, hardware: Hardware, layers: Layers) -> list[Part]:
    """Those of one layer."""
    hidden, tp = hardware.architecture.hidden, hardware.tp
    mlp, attention = layers.mlp, layers.attention
    width = mlp.intermediate if isinstance(mlp, Dense) else mlp.shared_intermediate
    norms = 2 if width or isinstance(mlp, Moe) else 1
    moved = norms * [8.0 * hidden]
    if width:
        moved.append((6.0 if mlp.gated else 4.0) * width / tp)
    if isinstance(mlp, Moe):
        moved.append(4.0 * mlp.experts)
    if isinstance(attention, Gqa):
        keys = max(attention.kv_heads // tp, 1)
        moved.append(4.0 * (attention.heads // tp + keys) * attention.head_dim)
        moved.append(8.0 * keys * attention.head_dim)
    elif isinstance(attention, GatedDelta):
        moved.append(6.0 * attention.v_heads * attention.v_dim / tp)
    elif isinstance(attention, Mamba):
        moved.append(6.0 * attention.inner / tp)
    elif not attention.sparse:
        moved.append(4.0 * (attention.heads // tp) * attention.qk_rope_head_dim)
        moved.append(4.0 * attention.latent)
        moved.append(4.0 * (attention.q_lora_rank + attention.kv_lora_rank))
    return [Part("small kernels", "slots", operators.elementwise(nbytes)) for nbytes in moved]


def sampler(operators: Operators, hardware: Hardware) -> list[Part]:
    """Greedy or by temperature."""
    vocab = hardware.architecture.vocab
    return [
        Part("sampler", "emits", operators.elementwise(nbytes * vocab)) for nbytes in (6.0, 4.0)
    ]
