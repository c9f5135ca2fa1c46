"""Parts of a mixture of experts: router, routed experts, shared expert, and exchange of tokens."""

from __future__ import annotations

from simkv.costs.cost_profile import Feature
from simkv.costs.hardware.model_architecture import DenseMlp, MoeMlp
from simkv.costs.hardware.replica_hardware import Hardware
from simkv.costs.operators.operator_times import MoeShape, OperatorTimes
from simkv.costs.operators.step_parts.matrix_products import mlp_parts, product_curve
from simkv.costs.operators.step_parts.step_part import StepPart


def moe_parts(operators: OperatorTimes, hardware: Hardware, moe: MoeMlp) -> list[StepPart]:
    """Return the parts of the step time for one layer with a mixture of experts.

    The experts process the tokens of all data-parallel ranks.
    """
    hidden = hardware.architecture.hidden
    feature: Feature = "group_tokens" if hardware.dp > 1 else "slots"
    shape = MoeShape(
        hidden,
        # Without a gate, an expert has two matrix products instead of three.
        moe.intermediate if moe.gated else moe.intermediate * 2 // 3,
        moe.per_token,
        moe.experts,
        hardware.expert_tp,
        hardware.ep,
    )
    parts = [
        StepPart(
            "router",
            "slots",
            product_curve(operators, hardware, "bf16", (moe.experts, hidden)),
        ),
        StepPart("experts", feature, operators.experts(shape, hardware.experts)),
    ]
    if moe.shared_intermediate:
        shared = DenseMlp(moe.shared_intermediate, moe.gated)
        parts += mlp_parts(operators, hardware, shared, "shared expert")
    if hardware.dp > 1:
        for name in ("all_gather", "reduce_scatter"):
            curve = operators.collective(name, hardware.gpus, hidden)
            parts.append(StepPart("tokens to experts and back", feature, curve))
    return parts
