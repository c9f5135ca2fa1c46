"""Matrix products: projections of attention and MLPs, and the output head.

Widths are per GPU: tensor parallelism divides them, but each GPU has at least one KV head, and the
latent projections of MLA are replicated (DeepSeek-V2, arXiv 2405.04434).
"""

from __future__ import annotations

from simkv.costs.cost_profile import Feature
from simkv.costs.hardware.model_architecture import (
    Attention,
    DenseMlp,
    GatedDeltaNet,
    Gqa,
    Mamba,
    Mla,
)
from simkv.costs.hardware.number_formats import find_number_format
from simkv.costs.hardware.replica_hardware import Hardware
from simkv.costs.operators.operator_times import OperatorTimes
from simkv.costs.operators.piecewise_curve import Curve
from simkv.costs.operators.step_parts.step_part import StepPart

#: Number of columns and inner dimension of a matrix.
Product = tuple[int, int]


def product_curve(operators: OperatorTimes, hardware: Hardware, form: str, shape: Product) -> Curve:
    """Return the time (s) of a matrix product as a function of the number of tokens.

    The time is at least the time to read the weights once.
    """
    n, k = shape
    nbytes = find_number_format(form).bytes * n * k
    return operators.gemm(form, n, k).at_least(nbytes / hardware.gpu.bandwidth)


def projection_parts(
    operators: OperatorTimes, hardware: Hardware, attention: Attention
) -> list[StepPart]:
    """Return the parts of the step time for the projections of attention.

    The result is empty if the times of the attention core include the projections.
    """
    hidden, tp = hardware.architecture.hidden, hardware.tp
    shapes: list[tuple[Product, Feature]] = []
    if isinstance(attention, Gqa):
        queries = attention.heads * (2 if attention.output_gate else 1) // tp
        keys = max(attention.kv_heads // tp, 1)
        shapes = [
            (((queries + 2 * keys) * attention.head_dim, hidden), "slots"),
            ((hidden, attention.heads * attention.head_dim // tp), "slots"),
        ]
    elif isinstance(attention, GatedDeltaNet):
        values = attention.v_heads * attention.v_dim
        wide = (attention.channels + attention.gates) // tp
        shapes = [((wide, hidden), "slots"), ((hidden, values // tp), "slots")]
        if rank := attention.gate_rank:
            shapes += [((values // tp, rank), "slots")] * 2
    elif isinstance(attention, Mamba):
        shapes = _state_space(attention, hidden, tp)
    elif not attention.sparse:
        shapes = _latent(attention, hidden, tp)
    return [
        StepPart(
            "products of attention",
            feature,
            product_curve(operators, hardware, hardware.attention, shape),
        )
        for shape, feature in shapes
    ]


def _latent(attention: Mla, hidden: int, tp: int) -> list[tuple[Product, Feature]]:
    heads = attention.heads // tp
    query = heads * (attention.qk_nope_head_dim + attention.qk_rope_head_dim)
    unfolded = heads * (attention.qk_nope_head_dim + attention.v_head_dim)
    down = attention.q_lora_rank + attention.latent_width
    shapes: list[tuple[Product, Feature]] = [
        ((hidden, heads * attention.v_head_dim), "slots"),
        ((unfolded, attention.kv_lora_rank), "prefill_tokens"),
    ]
    if attention.q_lora_rank:
        shapes += [((down, hidden), "slots"), ((query, attention.q_lora_rank), "slots")]
    else:
        shapes.append(((query + attention.latent_width, hidden), "slots"))
    return shapes


def _state_space(attention: Mamba, hidden: int, tp: int) -> list[tuple[Product, Feature]]:
    inner = attention.inner // tp
    wide = inner + (attention.channels(tp) + attention.mamba2_heads) // tp
    shapes: list[tuple[Product, Feature]] = [((wide, hidden), "slots"), ((hidden, inner), "slots")]
    if not attention.mamba2_heads:
        steps = attention.rank
        shapes += [((steps + 2 * attention.state, inner), "slots"), ((inner, steps), "slots")]
    return shapes


def mlp_parts(
    operators: OperatorTimes, hardware: Hardware, one: DenseMlp, name: str
) -> list[StepPart]:
    """Return the parts of the step time for the matrix products of a dense MLP or shared expert."""
    hidden, width = hardware.architecture.hidden, one.intermediate // hardware.tp
    shapes = (((2 if one.gated else 1) * width, hidden), (hidden, width)) if width else ()
    return [
        StepPart(name, "slots", product_curve(operators, hardware, hardware.weights, shape))
        for shape in shapes
    ]


def head_parts(operators: OperatorTimes, hardware: Hardware) -> list[StepPart]:
    """Return the part of the step time for the output head. Its weights have 16 bits.

    The feature of this part is the number of sampled tokens.
    """
    model = hardware.architecture
    shape = (-(-model.vocab // hardware.tp), model.hidden)
    return [StepPart("head", "emits", product_curve(operators, hardware, "bf16", shape))]
