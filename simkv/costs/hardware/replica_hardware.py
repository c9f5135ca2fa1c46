"""The hardware of a replica: GPUs, model, parallelism and number formats."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from simkv.core.errors import InputError
from simkv.costs.hardware.interconnect import Interconnect
from simkv.costs.hardware.model_architecture import Architecture, Recurrent
from simkv.costs.hardware.model_gpu_catalog import Gpu
from simkv.costs.hardware.number_formats import FormatName, KvFormatName

#: Kernels that are selected by a switch of the server: Marlin for mxfp4 experts, and 8-bit
#: activations (mxfp8) for mxfp4 experts.
KernelSwitch = Literal["marlin", "mxfp8"]


@dataclass(frozen=True)
class Hardware:
    """The hardware of one replica: ``tp x dp`` GPUs with the model ``architecture``.

    ``tp`` is the tensor parallel size, ``dp`` the data parallel size and ``ep`` the expert parallel
    size.

    Number formats are ``weights`` for dense MLPs, ``attention`` for attention projections,
    ``experts`` for experts, and ``kv`` for the KV cache. ``kernels`` are the kernels selected with
    options of the server (``KernelSwitch``).
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
    kernels: tuple[KernelSwitch, ...] = ()

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
    kernels: tuple[KernelSwitch, ...] = (),
) -> Hardware:
    """Return validated hardware, with defaults for missing values.

    ``weights`` is the default of ``attention`` and ``experts``. The default of ``weights`` is the
    format of the published model. Raises InputError if the model cannot be distributed over the
    GPUs.
    """
    published = architecture.published
    if weights == "fp8" and published.weights == "fp8_block":
        weights = published.weights  # an engine uses the scales of the checkpoint
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
        kernels,
    )
    _check(made)
    return made


def add_layers(hardware: Hardware, layers: int) -> Hardware:
    """Return the hardware with ``layers`` more layers of the model, for multi-token prediction.

    The added layers have the shape of the model's last layer with KV for the whole context.
    """
    if not layers:
        return hardware
    parts = list(hardware.architecture.layers)
    kinds = [n for n, part in enumerate(parts) if not isinstance(part.attention, Recurrent)]
    whole = [n for n in kinds if not getattr(parts[n].attention, "window", 0)]
    last = (whole or kinds or [len(parts) - 1])[-1]
    parts[last] = replace(parts[last], count=parts[last].count + layers)
    return replace(hardware, architecture=replace(hardware.architecture, layers=tuple(parts)))


def _check(hardware: Hardware) -> None:
    model = hardware.architecture
    for part in model.layers:
        heads = part.attention.heads
        kv_heads = getattr(part.attention, "kv_heads", None)
        # Rule of vLLM (QKVParallelLinear) and SGLang: a GPU has whole KV heads, or a copy of one.
        allowed = [
            gpus
            for gpus in range(1, heads + 1)
            if heads % gpus == 0 and not (kv_heads and kv_heads % gpus and gpus % kv_heads)
        ]
        if hardware.tp not in allowed:
            also = f" and {kv_heads} KV heads" if kv_heads else ""
            raise InputError(
                f"hardware: tp: {hardware.tp} GPUs cannot split the {heads} heads{also} of "
                f"{model.name} evenly; expected one of {', '.join(map(str, allowed))}"
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
            f"{model.name} evenly; use a divisor of {model.experts}"
        )
