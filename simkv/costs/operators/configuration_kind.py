"""Properties of a configuration that determine which measurements are similar to it."""

from __future__ import annotations

from dataclasses import dataclass

from simkv.core.execution_settings import ExecutionSettings
from simkv.costs.hardware.model_architecture import GatedDeltaNet, Mamba, Mla
from simkv.costs.hardware.replica_hardware import Hardware

#: For each GPU family, words that occur in the names of its GPUs.
GPU_FAMILIES = {
    "blackwell": ("B200", "B300", "GB200", "GB300"),
    "blackwell workstation": ("PRO", "5090", "5080", "GB10"),
    "hopper": ("H100", "H200", "H20", "GH200"),
    "ada": ("L4", "L40S", "L40", "4090", "4080", "Ada"),
    "ampere": ("A100", "A10", "3090", "3060"),
}


@dataclass(frozen=True, order=True)
class Configuration:
    """Engine, GPU, model and number formats of a configuration.

    ``attention`` is gqa, mla, dsa (MLA with an indexer), gdn or ssm. ``experts`` is the number
    format of the experts, or "none". ``weights`` is the format of other weights.
    """

    backend: str
    family: str
    gpu: str
    model: str
    attention: str
    experts: str
    weights: str

    @property
    def mlp(self) -> str:
        """``dense``, or ``moe`` for a mixture of experts."""
        return "dense" if self.experts == "none" else "moe"

    @property
    def class_name(self) -> str:
        """Name of the engine and the kind of MLP, such as ``vllm dense``."""
        return f"{self.backend} {self.mlp}"

    @property
    def pair(self) -> str:
        """Description of the engine, the model, the GPU and the number formats as text."""
        return f"{self.backend}, {self.model} on {self.gpu}, {self.weights} {self.experts}"


def classify_configuration(hardware: Hardware, setting: ExecutionSettings) -> Configuration:
    """Return the ``Configuration`` of a replica."""
    model, gpu = hardware.architecture, hardware.gpu.name
    kinds = [part.attention for part in model.layers]
    attention = "gqa"
    if any(isinstance(kind, Mamba) for kind in kinds):
        attention = "ssm"
    elif any(isinstance(kind, GatedDeltaNet) for kind in kinds):
        attention = "gdn"
    elif any(isinstance(kind, Mla) and kind.sparse for kind in kinds):
        attention = "dsa"
    elif any(isinstance(kind, Mla) for kind in kinds):
        attention = "mla"
    experts = hardware.experts if model.experts else "none"
    return Configuration(
        setting.engine, find_gpu_family(gpu), gpu, model.name, attention, experts, hardware.weights
    )


def find_gpu_family(gpu: str) -> str:
    """Return the family of a GPU, such as ``hopper``, or ``unknown``."""
    words = set(gpu.split())
    return next((name for name, own in GPU_FAMILIES.items() if words & set(own)), "unknown")
