"""The ``hardware`` section of a scenario, which determines step costs and KV blocks.

hardware: {gpu: H100-SXM, model: llama-3.1-70b, tp: 4, weights: fp8, kv: fp8}
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, ValidationInfo, field_validator

from simkv.core.errors import InputError
from simkv.costs.hardware.hf_config import parse_architecture
from simkv.costs.hardware.interconnect import Interconnect
from simkv.costs.hardware.model_architecture import Architecture
from simkv.costs.hardware.model_gpu_catalog import find_architecture, find_gpu
from simkv.costs.hardware.number_formats import FormatName, KvFormatName
from simkv.costs.hardware.replica_hardware import Hardware, KernelSwitch, make_hardware
from simkv.scenario.base_section import Section

Gpus = Annotated[int, Field(gt=0, le=1024)]


class MeasuredLink(Section):
    """Measured interconnect between the GPUs of a host."""

    latency_us: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    """Latency of the smallest all-reduce operation (microseconds)."""
    bandwidth_gb_s: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    """Bandwidth per GPU and direction (GB/s)."""


class HardwareSection(Section):
    """GPUs, model, parallelism and number formats.

    ``tp`` is the tensor parallel size, ``dp`` the data parallel size, and ``ep`` the expert
    parallel size.
    """

    gpu: str
    """GPU name in any spelling: H100-SXM, h100_sxm, RTX 4090."""
    model: str
    """Name of a packaged model, or path of a Hugging Face config.json relative to the scenario
    file."""
    tp: Gpus = 1
    """Tensor parallel size: number of GPUs that split every layer."""
    ep: Gpus = 1
    """Expert parallel size: number of GPUs that divide the experts among them."""
    dp: Gpus = 1
    """Data parallel size: number of groups of GPUs that each compute attention for their own
    requests."""
    pp: Gpus = 1
    """Pipeline parallel size; only 1 is modelled."""
    weights: FormatName | None = None
    """Number format of the weights (default: the format of the published model)."""
    attention: FormatName | None = None
    """Number format of the attention weights, if it differs from ``weights``."""
    experts: FormatName | None = None
    """Number format of the expert weights, if it differs from ``weights``."""
    kv: KvFormatName | None = None
    """Number format of the KV cache (default: bf16)."""
    kernels: list[KernelSwitch] = Field(default=[])
    """Kernels for mxfp4 experts that were selected with an option of the server: marlin or
    mxfp8."""
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
    """Interconnect of the GPUs: NVLink, PCIe or measured values (default: from the data sheet)."""
    gpus_per_node: Gpus | None = None
    """Number of GPUs that the interconnect joins (default: the usual number for the GPU)."""
    tables: str | None = None
    """Directory with your own operator tables, relative to the scenario file. They take precedence
    over packaged tables."""

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
        # A published name is retained, because launch commands contain it.
        published = "/" in name or found != find_architecture(found.name)
        return name if published else found.name

    @field_validator("pp")
    @classmethod
    def _no_stages(cls, stages: int) -> int:
        if stages > 1:
            raise ValueError(
                f"must be 1, got {stages}: pipeline parallelism is not modelled; use tp"
            )
        return stages

    @field_validator("tables")
    @classmethod
    def _is_there(cls, tables: str | None, info: ValidationInfo) -> str | None:
        if tables is None:
            return None
        path = _folder(info) / tables
        if not path.is_dir():
            raise ValueError(f"directory {path} does not exist")
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
        raise InputError(f"file {path} does not exist")
    return parse_architecture(path, path.stem if path.stem != "config" else path.parent.name)


def build_hardware(section: HardwareSection) -> Hardware:
    """Return the hardware that the section describes, with defaults for missing fields.

    Raises InputError with the name of the field if the model cannot be split across the GPUs.
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
        kernels=tuple(section.kernels),
    )
