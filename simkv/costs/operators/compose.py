"""A profile from the times of single operators: what a step of this model on these GPUs costs.

A step is the sum of its kernels: products, experts, collectives and small kernels by its tokens as
padded for CUDA graphs, attention by the grid of ``costs/grid.py``, head and sampler by the
sequences that have a token sampled, and what the host takes on top (``composed/host.py``).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from simkv.costs.hardware.architecture import Dense
from simkv.costs.hardware.hardware import Hardware
from simkv.costs.hardware.setting import EngineSetting
from simkv.costs.operators.composed.attention import (
    CONTEXTS,
    SEQS,
    TOKENS,
    attention_grid,
    recurrences,
)
from simkv.costs.operators.composed.collectives import all_reduces
from simkv.costs.operators.composed.host import host
from simkv.costs.operators.composed.moe import mixture
from simkv.costs.operators.composed.part import Part
from simkv.costs.operators.composed.products import head, mlp, projections
from simkv.costs.operators.composed.small import sampler, small_kernels
from simkv.costs.operators.curve import rounded, total
from simkv.costs.operators.operators import Operators
from simkv.costs.profile import Feature, Fit, Profile, Term, When

#: A pass of the scheduler that finds nothing to run; its size decides nothing but must not be 0.
IDLE_PASS_S = 1e-4


def compose(
    hardware: Hardware,
    setting: EngineSetting,
    operators: Operators,
    source: Iterable[str],
    *,
    measured: bool = True,
) -> Profile:
    """The profile; its error is not known here (``fit`` says so), its range is the tables'."""
    parts = _parts(operators, hardware, setting)
    grid = attention_grid(operators, hardware)
    beside = host(hardware, setting)
    ranges: dict[Feature, tuple[float, float]] = {
        "tokens": (1.0, float(TOKENS[-1])),
        "prefill_context": (0.0, float(CONTEXTS[-2])),
        "decode_seqs": (1.0, float(SEQS[-1])),
        "decode_mean": (1.0, float(CONTEXTS[-2])),
    }
    return Profile(
        name=name_of(hardware),
        engine=f"{setting.engine} {setting.release}",
        model=hardware.architecture.name,
        gpu=hardware.gpu.name,
        basis="composed of measured operators" if measured else "estimated from the data sheet",
        terms=[*_terms(parts), *beside.on_top],
        floor=beside.floor or None,
        grid=grid,
        graph_sizes=[] if setting.graph_mode == "eager" else list(setting.graph_sizes),
        idle_pass_s=IDLE_PASS_S,
        range=ranges,
        fit=Fit(
            points=operators.points,
            note="operators that were measured by themselves; the error of whole steps is not "
            "known here",
        ),
        source=[*source, *beside.sources, *operators.notes],
    )


def name_of(hardware: Hardware) -> str:
    """What a profile of it is called."""
    said = f"{hardware.architecture.name} on {hardware.gpus} x {hardware.gpu.name}"
    return f"{said}: {said_of(hardware)}"


def said_of(hardware: Hardware) -> str:
    """Parallelism and number formats."""
    said = [f"tp {hardware.tp}"]
    said += [f"dp {hardware.dp}"] if hardware.dp > 1 else []
    said += [f"ep {hardware.ep}"] if hardware.ep > 1 else []
    said.append(hardware.weights)
    said += [f"attention {hardware.attention}"] if hardware.attention != hardware.weights else []
    if hardware.architecture.experts and hardware.experts != hardware.weights:
        said.append(f"experts {hardware.experts}")
    return ", ".join([*said, f"KV {hardware.kv}"])


def _parts(operators: Operators, hardware: Hardware, setting: EngineSetting) -> list[Part]:
    parts: list[Part] = []
    for layers in hardware.architecture.layers:
        one = projections(operators, hardware, layers.attention)
        one += small_kernels(operators, hardware, layers)
        if isinstance(layers.mlp, Dense):
            one += mlp(operators, hardware, layers.mlp, "products of the MLP")
        else:
            one += mixture(operators, hardware, layers.mlp)
        parts += [replace(part, curve=part.curve.times(layers.count)) for part in one]
    parts += recurrences(operators, hardware)
    parts += all_reduces(operators, hardware, setting)
    return parts + head(operators, hardware) + sampler(operators, hardware)


def _terms(parts: Iterable[Part]) -> list[Term]:
    """Parts of one name as one term."""
    groups: dict[tuple[str, Feature, When], list[Part]] = {}
    for part in parts:
        groups.setdefault((part.name, part.feature, part.when), []).append(part)
    terms = []
    for (name, feature, when), group in groups.items():
        curve = total(part.curve for part in group)
        table = list(zip(curve.xs, rounded(curve.ys), strict=True))
        terms.append(Term(name=name, feature=feature, when=when, table=table))
    return terms
