"""Matrix products of a layer: projections of attention and MLPs, and the head.

Widths are those of one GPU: by tensor parallelism, KV heads at least one, latent projections whole
(DeepSeek-V2, arXiv 2405.04434; engines replicate them).
"""

from __future__ import annotations

from simkv.costs.hardware.architecture import Attention, Dense, GatedDelta, Gqa, Mamba, Mla
from simkv.costs.hardware.formats import find_format
from simkv.costs.hardware.hardware import Hardware
from simkv.costs.operators.composed.part import Part
from simkv.costs.operators.curve import Curve
from simkv.costs.operators.operators import Operators
from simkv.costs.profile import Feature

#: Columns and depth.
Product = tuple[int, int]


def product(operators: Operators, hardware: Hardware, form: str, shape: Product) -> Curve:
    """Seconds by tokens; never less than it takes to read the weights once."""
    n, k = shape
    nbytes = find_format(form).bytes * n * k
    return operators.gemm(form, n, k).at_least(nbytes / hardware.gpu.bandwidth)


def projections(operators: Operators, hardware: Hardware, attention: Attention) -> list[Part]:
    """Those of an attention of any kind, without those that its core has in it."""
    hidden, tp = hardware.architecture.hidden, hardware.tp
    shapes: list[tuple[Product, Feature]] = []
    if isinstance(attention, Gqa):
        queries = attention.heads * (2 if attention.output_gate else 1) // tp
        keys = max(attention.kv_heads // tp, 1)
        shapes = [
            (((queries + 2 * keys) * attention.head_dim, hidden), "slots"),
            ((hidden, attention.heads * attention.head_dim // tp), "slots"),
        ]
    elif isinstance(attention, GatedDelta):
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
        Part(
            "products of attention",
            feature,
            product(operators, hardware, hardware.attention, shape),
        )
        for shape, feature in shapes
    ]


def _latent(attention: Mla, hidden: int, tp: int) -> list[tuple[Product, Feature]]:
    heads = attention.heads // tp
    query = heads * (attention.qk_nope_head_dim + attention.qk_rope_head_dim)
    unfolded = heads * (attention.qk_nope_head_dim + attention.v_head_dim)
    down = attention.q_lora_rank + attention.latent
    shapes: list[tuple[Product, Feature]] = [
        ((hidden, heads * attention.v_head_dim), "slots"),
        ((unfolded, attention.kv_lora_rank), "prefill_tokens"),
    ]
    if attention.q_lora_rank:
        shapes += [((down, hidden), "slots"), ((query, attention.q_lora_rank), "slots")]
    else:
        shapes.append(((query + attention.latent, hidden), "slots"))
    return shapes


def _state_space(attention: Mamba, hidden: int, tp: int) -> list[tuple[Product, Feature]]:
    inner = attention.inner // tp
    wide = inner + (attention.channels(tp) + attention.mamba2_heads) // tp
    shapes: list[tuple[Product, Feature]] = [((wide, hidden), "slots"), ((hidden, inner), "slots")]
    if not attention.mamba2_heads:
        steps = attention.rank
        shapes += [((steps + 2 * attention.state, inner), "slots"), ((inner, steps), "slots")]
    return shapes


def mlp(operators: Operators, hardware: Hardware, one: Dense, name: str) -> list[Part]:
    """Gate, where it has one, up and down of a dense MLP or of a shared expert."""
    hidden, width = hardware.architecture.hidden, one.intermediate // hardware.tp
    shapes = (((2 if one.gated else 1) * width, hidden), (hidden, width)) if width else ()
    return [
        Part(name, "slots", product(operators, hardware, hardware.weights, shape))
        for shape in shapes
    ]


def head(operators: Operators, hardware: Hardware) -> list[Part]:
    """The output head in 16 bits, of each sequence that has a token sampled."""
    model = hardware.architecture
    shape = (-(-model.vocab // hardware.tp), model.hidden)
    return [Part("head", "emits", product(operators, hardware, "bf16", shape))]
