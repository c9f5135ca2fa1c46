"""Hardware of a replica: GPUs, model, parallelism and number formats."""

from __future__ import annotations

from dataclasses import dataclass

from simkv.core.errors import InputError
from simkv.costs.hardware.interconnect import Interconnect
from simkv.costs.hardware.model_architecture import Architecture
from simkv.costs.hardware.model_gpu_catalog import Gpu
from simkv.costs.hardware.number_formats import FormatName, KvFormatName


@dataclass(frozen=True)
class Hardware:
    """Hardware of one replica: ``tp x dp`` GPUs that hold ``architecture``.

    ``tp`` GPUs split every attention layer; ``dp`` such groups process separate requests (each has
    its share of the batch). Experts are distributed over ``ep`` GPUs as whole experts (1: each
    expert is split across all ``tp x dp`` GPUs; otherwise across ``tp x dp / ep``). ``weights`` is
    the format of attention projections and dense MLPs; ``attention`` and ``experts`` apply to these
    parts only. Embedding, head, router and norms stay in 16 bits.
    """

    gpu: Gpu
    architecture: Architecture
    tp: int
    ep: int
    dp: int
    weights: FormatName
    attention: FormatName
    experts: FormatName
    kv: KvFormatName
    interconnect: Interconnect
    gpus_per_node: int

    @property
    def gpus(self) -> int:
        """Number of GPUs in the replica."""
        return self.tp * self.dp

    @property
    def expert_tp(self) -> int:
        """Number of GPUs that split one expert."""
        return self.gpus // self.ep


def make_hardware(
    gpu: Gpu,
    architecture: Architecture,
    *,
    tp: int = 1,
    ep: int = 1,
    dp: int = 1,
    weights: FormatName | None = None,
    attention: FormatName | None = None,
    experts: FormatName | None = None,
    kv: KvFormatName | None = None,
    interconnect: Interconnect | None = None,
    gpus_per_node: int | None = None,
) -> Hardware:
    """Build validated hardware, with defaults for missing values.

    If ``weights`` is given, it is also the default of ``attention`` and ``experts``; otherwise all
    have the formats of the published model. Raises InputError, with the field, for GPUs that cannot
    share the model.
    """
    published = architecture.published
    if weights is None:
        attention = attention or published.attention or published.weights
        experts = experts or published.experts or published.weights
    chosen = weights or published.weights
    made = Hardware(
        gpu,
        architecture,
        tp,
        ep,
        dp,
        chosen,
        attention or chosen,
        experts or chosen,
        kv or published.kv,
        interconnect or gpu.interconnect(),
        gpus_per_node or gpu.gpus_per_node,
    )
    _check(made)
    return made


def _check(hardware: Hardware) -> None:
    model = hardware.architecture
    for part in model.layers:
        heads = part.attention.heads
        if heads % hardware.tp:
            raise InputError(
                f"hardware: tp: {hardware.tp} GPUs cannot split the {heads} heads of {model.name} "
                "evenly"
            )
    if hardware.ep > 1 and not model.experts:
        raise InputError(f"hardware: ep: {model.name} has no experts; remove ep")
    if hardware.gpus % hardware.ep:
        raise InputError(
            f"hardware: ep: must divide tp x dp = {hardware.gpus} GPUs, got {hardware.ep}"
        )
    if hardware.ep > 1 and model.experts % hardware.ep:
        raise InputError(
            f"hardware: ep: {hardware.ep} GPUs cannot split the {model.experts} experts of "
            f"{model.name} evenly"
        )
