"""The ``hardware`` section of a scenario: what step costs and KV blocks follow from.

hardware: {gpu: H100-SXM, model: llama-3.1-70b, tp: 4, weights: fp8, kv: fp8}
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, ValidationInfo, field_validator

from simkv.core.errors import InputError
from simkv.costs.hardware.architecture import Architecture
from simkv.costs.hardware.hf_config import parse_architecture
from simkv.costs.hardware.interconnect import Interconnect
from simkv.costs.hardware.model_gpu_catalog import find_architecture, find_gpu
from simkv.costs.hardware.number_formats import FormatName, KvFormatName
from simkv.costs.hardware.replica_hardware import Hardware, make_hardware
from simkv.scenario.base_section import Section

Gpus = Annotated[int, Field(gt=0, le=1024)]


class MeasuredLink(Section):
    """What was measured between the GPUs of a host."""

    latency_us: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    """Of the smallest all-reduce, in microseconds."""
    bandwidth_gb_s: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    """Of one GPU each way, in gigabytes per second."""


class HardwareSection(Section):
    """GPUs, a model, how they share it, and the formats of its numbers.

    ``tp`` GPUs share every layer, ``dp`` such groups attend to requests of their own, ``ep`` GPUs
    share the experts as whole experts.
    """

    gpu: str
    """The GPU by any of its names: H100-SXM, h100_sxm, RTX 4090."""
    model: str
    """A packaged model by any of its names, or its Hugging Face config.json beside the scenario."""
    tp: Gpus = 1
    """GPUs that share every layer (tensor parallel)."""
    ep: Gpus = 1
    """GPUs that share the experts as whole ones (expert parallel)."""
    dp: Gpus = 1
    """Groups of such GPUs that attend to requests of their own (data-parallel attention)."""
    pp: Gpus = 1
    """Stages of layers one after the other (pipeline parallel); only 1 is modelled."""
    weights: FormatName | None = None
    """Format of the weights; left out, that in which the model is published."""
    attention: FormatName | None = None
    """Format of the weights of attention, if another."""
    experts: FormatName | None = None
    """Format of the weights of the experts, if another."""
    kv: KvFormatName | None = None
    """Format of the KV cache; left out, bf16."""
    interconnect: (
        Annotated[
            Annotated[Literal["NVLink", "PCIe"], Tag("name")]
            | Annotated[MeasuredLink, Tag("measured")],
            Discriminator(
                lambda value: "measured" if isinstance(value, dict | MeasuredLink) else "name"
            ),
        ]
        | None
    ) = None
    """What joins the GPUs; left out, what the data sheet has. Or what was measured on the host."""
    gpus_per_node: Gpus | None = None
    """GPUs that the interconnect joins; left out, as usual for the GPU."""
    tables: str | None = None
    """Folder beside the scenario with operator tables of one's own, which go before all others."""

    @field_validator("gpu")
    @classmethod
    def _known_gpu(cls, name: str) -> str:
        try:
            return find_gpu(name).name
        except InputError as error:
            raise ValueError(str(error)) from error

    @field_validator("model")
    @classmethod
    def _known_model(cls, name: str, info: ValidationInfo) -> str:
        try:
            found = _architecture(name, _folder(info))
        except InputError as error:
            raise ValueError(str(error)) from error
        if name.endswith(".json"):
            return str((_folder(info) / name).resolve())
        return found.name if found == find_architecture(found.name) else name

    @field_validator("pp")
    @classmethod
    def _no_stages(cls, stages: int) -> int:
        if stages > 1:
            raise ValueError(f"{stages}: pipeline parallelism is not modelled; only 1, or use tp")
        return stages

    @field_validator("tables")
    @classmethod
    def _is_there(cls, tables: str | None, info: ValidationInfo) -> str | None:
        if tables is None:
            return None
        path = _folder(info) / tables
        if not path.is_dir():
            raise ValueError(f"there is no folder {path}")
        return str(path.resolve())


def _folder(info: ValidationInfo) -> Path:
    context: dict[str, Any] = info.context or {}
    folder: Path = context.get("folder", Path())
    return folder


def _architecture(name: str, folder: Path) -> Architecture:
    if not name.endswith(".json"):
        return find_architecture(name)
    path = folder / name
    if not path.is_file():
        raise InputError(f"there is no file {path}")
    return parse_architecture(path, path.stem if path.stem != "config" else path.parent.name)


def build_hardware(section: HardwareSection) -> Hardware:
    """What the section says, with what it leaves out.

    Raises InputError, by field, for GPUs that cannot share the model.
    """
    gpu, link = find_gpu(section.gpu), section.interconnect
    if isinstance(link, MeasuredLink):
        joined = Interconnect("measured", link.bandwidth_gb_s * 1e9, link.latency_us / 1e6)
    else:
        try:
            joined = gpu.interconnect(link)
        except InputError as error:
            raise InputError(f"hardware: {error}") from error
    return make_hardware(
        gpu,
        _architecture(section.model, Path()),
        tp=section.tp,
        ep=section.ep,
        dp=section.dp,
        weights=section.weights,
        attention=section.attention,
        experts=section.experts,
        kv=section.kv,
        interconnect=joined,
        gpus_per_node=section.gpus_per_node,
    )
