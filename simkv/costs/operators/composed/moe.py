"""A mixture of experts: router, routed experts, a shared one, and what data parallelism sends."""

from __future__ import annotations

from simkv.costs.hardware.architecture import Dense, Moe
from simkv.costs.hardware.hardware import Hardware
from simkv.costs.operators.composed.part import Part
from simkv.costs.operators.composed.products import mlp, product
from simkv.costs.operators.operators import MoeShape, Operators
from simkv.costs.profile import Feature


def mixture(operators: Operators, hardware: Hardware, moe: Moe) -> list[Part]:
    """One layer. With ``dp`` groups the experts see the tokens of all of them."""
    hidden = hardware.architecture.hidden
    feature: Feature = "group_tokens" if hardware.dp > 1 else "slots"
    shape = MoeShape(
        hidden,
        # Without a gate an expert has two thirds of the products.
        moe.intermediate if moe.gated else moe.intermediate * 2 // 3,
        moe.per_token,
        moe.experts,
        hardware.expert_tp,
        hardware.ep,
    )
    parts = [
        Part(
            "router",
            "slots",
            product(operators, hardware, "bf16", (moe.experts, hidden)),
        ),
        Part("experts", feature, operators.experts(shape, hardware.experts)),
    ]
    if moe.shared_intermediate:
        shared = Dense(moe.shared_intermediate, moe.gated)
        parts += mlp(operators, hardware, shared, "shared expert")
    if hardware.dp > 1:
        for name in ("all_gather", "reduce_scatter"):
            curve = operators.collective(name, hardware.gpus, hidden)
            parts.append(Part("tokens to experts and back", feature, curve))
    return parts
