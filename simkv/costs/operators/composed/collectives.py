"""All-reduces of tensor parallelism, inside CUDA graphs and launched one by one."""

from __future__ import annotations

from simkv.costs.hardware.architecture import Dense
from simkv.costs.hardware.hardware import Hardware
from simkv.costs.hardware.setting import EngineSetting
from simkv.costs.operators.composed.part import Part
from simkv.costs.operators.curve import Curve
from simkv.costs.operators.operators import Operators


def all_reduces(operators: Operators, hardware: Hardware, setting: EngineSetting) -> list[Part]:
    """After attention and after the MLP of every layer; and the logits of the head."""
    if hardware.tp == 1:
        return []
    model = hardware.architecture
    # With several groups the experts' results go back by another collective.
    count = sum(
        layers.count * (2 if hardware.dp == 1 or isinstance(layers.mlp, Dense) else 1)
        for layers in model.layers
    )
    inside = operators.all_reduce(hardware.tp, model.hidden, graph=True).times(count)
    outside = operators.all_reduce(hardware.tp, model.hidden, graph=False).times(count)
    logits = operators.collective("all_gather", hardware.tp, model.vocab)
    parts = [Part("all-gather of logits", "emits", logits)]
    largest = setting.graph_sizes[-1] if setting.graph_sizes else 0
    name = "all-reduce"
    if setting.graph_mode == "eager" or not largest:
        return [*parts, Part(name, "slots", outside)]
    both = _joined(inside, outside, largest)
    if setting.graph_mode != "full decode only":
        return [*parts, Part(name, "slots", both)]
    return [
        *parts,
        Part(name, "slots", both, when="pure decode"),
        Part(name, "slots", outside, when="prefill"),
    ]


def _joined(inside: Curve, outside: Curve, largest: int) -> Curve:
    """One curve up to ``largest`` tokens, the other from the next token on."""
    below = [x for x in inside.xs if x < largest] + [largest]
    above = [largest + 1] + [x for x in outside.xs if x > largest + 1]
    xs = (*below, *above)
    return Curve(xs, (*(inside(x) for x in below), *(outside(x) for x in above)))
