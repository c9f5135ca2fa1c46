"""Tensor-parallel all-reduces, in CUDA graphs or launched separately."""

from __future__ import annotations

from simkv.costs.hardware.execution_settings_lookup import ExecutionSettings
from simkv.costs.hardware.model_architecture import DenseMlp
from simkv.costs.hardware.replica_hardware import Hardware
from simkv.costs.operators.operator_times import OperatorTimes
from simkv.costs.operators.piecewise_curve import Curve
from simkv.costs.operators.step_parts.step_part import StepPart


def all_reduce_parts(
    operators: OperatorTimes, hardware: Hardware, setting: ExecutionSettings
) -> list[StepPart]:
    """Return the parts of the step time for all-reduces in every layer and the all-gather of
    logits.
    """
    if hardware.tp == 1:
        return []
    model = hardware.architecture
    # With data-parallel attention, another collective returns the results of the experts.
    count = sum(
        layers.count * (2 if hardware.dp == 1 or isinstance(layers.mlp, DenseMlp) else 1)
        for layers in model.layers
    )
    inside = operators.all_reduce(hardware.tp, model.hidden, graph=True).times(count)
    outside = operators.all_reduce(hardware.tp, model.hidden, graph=False).times(count)
    logits = operators.collective("all_gather", hardware.tp, model.vocab)
    parts = [StepPart("all-gather of logits", "emits", logits)]
    largest = setting.graph_sizes[-1] if setting.graph_sizes else 0
    name = "all-reduce"
    if setting.graph_mode == "eager" or not largest:
        return [*parts, StepPart(name, "slots", outside)]
    both = _joined(inside, outside, largest)
    if setting.graph_mode != "full decode only":
        return [*parts, StepPart(name, "slots", both)]
    return [
        *parts,
        StepPart(name, "slots", both, when="pure decode"),
        StepPart(name, "slots", outside, when="prefill"),
    ]


def _joined(inside: Curve, outside: Curve, largest: int) -> Curve:
    """Return the curve ``inside`` up to ``largest`` tokens, and ``outside`` above."""
    below = [x for x in inside.xs if x < largest] + [largest]
    above = [largest + 1] + [x for x in outside.xs if x > largest + 1]
    xs = (*below, *above)
    return Curve(xs, (*(inside(x) for x in below), *(outside(x) for x in above)))
