"""Memory-bound kernels: norms, activations, rotary positions, KV writes and the sampler.

Numbers have 2 bytes. Engines fuse the quantization of the next product's input into norms and
activations. An RMS norm with its residual reads two vectors and writes two. The gated activation
reads two vectors and writes one. The kernel for rotary positions reads and writes queries and keys.
The KV write reads and writes keys and values. The sampler converts logits to 32 bits (6 bytes per
vocabulary entry) and reads them (4 bytes). Sorting for top-k or top-p sampling is not included.
"""

from __future__ import annotations

from simkv.costs.hardware.model_architecture import (
    DenseMlp,
    GatedDeltaNet,
    Gqa,
    LayerSpec,
    Mamba,
    MoeMlp,
)
from simkv.costs.hardware.replica_hardware import Hardware
from simkv.costs.operators.operator_times import OperatorTimes
from simkv.costs.operators.step_parts.step_part import StepPart


def small_kernel_parts(
    operators: OperatorTimes, hardware: Hardware, layers: LayerSpec
) -> list[StepPart]:
    """Return the parts of the step time for the small kernels of one layer."""
    hidden, tp = hardware.architecture.hidden, hardware.tp
    mlp, attention = layers.mlp, layers.attention
    width = mlp.intermediate if isinstance(mlp, DenseMlp) else mlp.shared_intermediate
    norms = 2 if width or isinstance(mlp, MoeMlp) else 1
    moved = norms * [8.0 * hidden]
    if width:
        moved.append((6.0 if mlp.gated else 4.0) * width / tp)
    if isinstance(mlp, MoeMlp):
        moved.append(4.0 * mlp.experts)
    if isinstance(attention, Gqa):
        keys = max(attention.kv_heads // tp, 1)
        moved.append(4.0 * (attention.heads // tp + keys) * attention.head_dim)
        moved.append(8.0 * keys * attention.head_dim)
    elif isinstance(attention, GatedDeltaNet):
        moved.append(6.0 * attention.v_heads * attention.v_dim / tp)
    elif isinstance(attention, Mamba):
        moved.append(6.0 * attention.inner / tp)
    elif not attention.sparse:
        moved.append(4.0 * (attention.heads // tp) * attention.qk_rope_head_dim)
        moved.append(4.0 * attention.latent_width)
        moved.append(4.0 * (attention.q_lora_rank + attention.kv_lora_rank))
    return [StepPart("small kernels", "slots", operators.elementwise(nbytes)) for nbytes in moved]


def sampler_parts(operators: OperatorTimes, hardware: Hardware) -> list[StepPart]:
    """Return the parts of the step time for greedy sampling or sampling with a temperature."""
    vocab = hardware.architecture.vocab
    return [
        StepPart("sampler", "emits", operators.elementwise(nbytes * vocab)) for nbytes in (6.0, 4.0)
    ]
