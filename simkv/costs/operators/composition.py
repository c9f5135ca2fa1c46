"""Compose a cost profile of a model on given GPUs from the times of single operators.

The duration of a step is the sum over its kernels, plus host time (``host_time.py``). The times of
matrix products, experts, collectives and small kernels depend on the number of tokens, padded to
the size of a CUDA graph. The time of attention is interpolated in the grid of
``costs/attention_grid.py``. The times of the output head and the sampler depend on the number of
sampled tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from simkv.costs.cost_profile import (
    CostProfile,
    CostTerm,
    Feature,
    FitQuality,
    StepFilter,
)
from simkv.costs.hardware.execution_settings_lookup import ExecutionSettings
from simkv.costs.hardware.model_architecture import DenseMlp
from simkv.costs.hardware.replica_hardware import Hardware
from simkv.costs.operators.operator_times import OperatorTimes
from simkv.costs.operators.piecewise_curve import round_to_four_digits, sum_curves
from simkv.costs.operators.step_parts.all_reduce import all_reduce_parts
from simkv.costs.operators.step_parts.attention_core import (
    DECODE_CONTEXTS,
    DECODE_SEQS,
    PREFILL_TOKENS,
    attention_grid,
    recurrence_parts,
)
from simkv.costs.operators.step_parts.host_time import find_host_terms
from simkv.costs.operators.step_parts.matrix_products import head_parts, mlp_parts, projection_parts
from simkv.costs.operators.step_parts.mixture_of_experts import moe_parts
from simkv.costs.operators.step_parts.small_kernels import sampler_parts, small_kernel_parts
from simkv.costs.operators.step_parts.step_part import StepPart

#: Duration in seconds of a scheduler pass that runs no request; any positive value is suitable.
IDLE_PASS_S = 1e-4

UNKNOWN_ERROR = "the error of whole steps is unknown"


def compose(
    hardware: Hardware,
    setting: ExecutionSettings,
    operators: OperatorTimes,
    source: Iterable[str],
    *,
    measured: bool = True,
) -> CostProfile:
    """Return a cost profile composed of the times of single operators, without an error estimate.

    ``source`` is the source of the operator times. ``measured`` is False if they were estimated
    from the data sheet.
    """
    parts = _parts(operators, hardware, setting)
    grid = attention_grid(operators, hardware)
    beside = find_host_terms(hardware, setting)
    ranges: dict[Feature, tuple[float, float]] = {
        "tokens": (1.0, float(PREFILL_TOKENS[-1])),
        "prefill_context": (0.0, float(DECODE_CONTEXTS[-2])),
        "decode_seqs": (1.0, float(DECODE_SEQS[-1])),
        "decode_mean": (1.0, float(DECODE_CONTEXTS[-2])),
    }
    return CostProfile(
        name=build_profile_name(hardware),
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
        fit=FitQuality(
            points=operators.points,
            note=f"composed of separately measured operators; {UNKNOWN_ERROR}",
        ),
        source=[*source, *beside.sources, *operators.notes],
    )


def build_profile_name(hardware: Hardware) -> str:
    """Return the name of a profile for the hardware."""
    said = f"{hardware.architecture.name} on {hardware.gpus} x {hardware.gpu.name}"
    return f"{said}: {describe_layout(hardware)}"


def describe_layout(hardware: Hardware) -> str:
    """Describe the parallelism and the number formats as text, such as ``tp 4, fp8, KV bf16``."""
    said = [f"tp {hardware.tp}"]
    said += [f"dp {hardware.dp}"] if hardware.dp > 1 else []
    said += [f"ep {hardware.ep}"] if hardware.ep > 1 else []
    said.append(hardware.weights)
    said += [f"attention {hardware.attention}"] if hardware.attention != hardware.weights else []
    if hardware.architecture.experts and hardware.experts != hardware.weights:
        said.append(f"experts {hardware.experts}")
    return ", ".join([*said, f"KV {hardware.kv}"])


def _parts(
    operators: OperatorTimes, hardware: Hardware, setting: ExecutionSettings
) -> list[StepPart]:
    parts: list[StepPart] = []
    for layers in hardware.architecture.layers:
        one = projection_parts(operators, hardware, layers.attention)
        one += small_kernel_parts(operators, hardware, layers)
        if isinstance(layers.mlp, DenseMlp):
            one += mlp_parts(operators, hardware, layers.mlp, "products of the MLP")
        else:
            one += moe_parts(operators, hardware, layers.mlp)
        parts += [replace(part, curve=part.curve.times(layers.count)) for part in one]
    parts += recurrence_parts(operators, hardware)
    parts += all_reduce_parts(operators, hardware, setting)
    return parts + head_parts(operators, hardware) + sampler_parts(operators, hardware)


def _terms(parts: Iterable[StepPart]) -> list[CostTerm]:
    """Return one cost term for all parts with the same name, feature and ``when``."""
    groups: dict[tuple[str, Feature, StepFilter], list[StepPart]] = {}
    for part in parts:
        groups.setdefault((part.name, part.feature, part.when), []).append(part)
    terms = []
    for (name, feature, when), group in groups.items():
        curve = sum_curves(part.curve for part in group)
        table = list(zip(curve.xs, round_to_four_digits(curve.ys), strict=True))
        terms.append(CostTerm(name=name, feature=feature, when=when, table=table))
    return terms
