"""Kernels that a release of an engine runs on a GPU, and the operator tables that measure them.

``kernels.json`` has two parts. ``rules`` selects the kernel for an operator, number format, engine,
release, GPU and options of the server; the first rule that applies is used. ``kernels`` lists the
tables that measure each kernel, in order of preference. If no rule applies, the table whose version
is nearest to the release is used.
"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Literal

from simkv.core.execution_settings import ExecutionSettings
from simkv.costs.frozen_model import FrozenModel
from simkv.costs.hardware.replica_hardware import Hardware
from simkv.costs.operators.operator_tables import version_key

KERNELS_PATH = Path(__file__).with_name("kernels.json")

Operator = Literal["experts", "products", "attention"]


class KernelTable(FrozenModel):
    """Rows of operator tables that measure a kernel.

    ``backend`` is the measured engine. ``dtype`` is the number format in the table. ``source`` is a
    part of the text in the column ``kernel_source``.
    """

    backend: str
    dtype: str | None = None
    source: str


class Kernel(FrozenModel):
    """A kernel and the tables that measure it, in order of preference."""

    name: str
    tables: tuple[KernelTable, ...] = ()


class KernelRule(FrozenModel):
    """Conditions under which an engine runs a kernel. A condition that is None always holds.

    ``releases`` and ``capability`` (compute capability) are ranges that exclude their upper end.
    ``model`` is a part of the model's name. ``switch`` is one of ``Hardware.kernels``. ``source``
    is the source of the rule.
    """

    operator: Operator
    formats: tuple[str, ...] | None = None
    engine: str
    releases: tuple[str, str] | None = None
    capability: tuple[tuple[int, int], tuple[int, int]] | None = None
    model: str | None = None
    switch: str | None = None
    kernel: str
    source: str

    def fits(
        self, operator: Operator, form: str, hardware: Hardware, setting: ExecutionSettings
    ) -> bool:
        """Return whether the rule applies to an operator with the number format ``form``."""
        first, end = self.releases or ("0", "9999")
        low, high = self.capability or ((0, 0), (99, 0))
        return (
            self.operator == operator
            and self.engine == setting.engine
            and (self.formats is None or form in self.formats)
            and version_key(first) <= version_key(setting.release) < version_key(end)
            and low <= (hardware.gpu.capability or (0, 0)) < high
            and (self.model is None or self.model in hardware.architecture.name.lower())
            and (self.switch is None or self.switch in hardware.kernels)
        )


class KernelFile(FrozenModel):
    """Content of ``kernels.json``."""

    kernels: tuple[Kernel, ...]
    rules: tuple[KernelRule, ...]


@lru_cache(maxsize=1)
def read_kernels() -> KernelFile:
    """Return the content of ``kernels.json``."""
    return KernelFile.model_validate(json.loads(KERNELS_PATH.read_text(encoding="utf-8")))


def find_kernel(
    operator: Operator, form: str, hardware: Hardware, setting: ExecutionSettings
) -> Kernel | None:
    """Return the kernel of an operator, or None if no rule applies.

    ``form`` is the number format of the weights, or of the KV cache for attention.
    """
    known = read_kernels()
    for rule in known.rules:
        if rule.fits(operator, form, hardware, setting):
            return next(kernel for kernel in known.kernels if kernel.name == rule.kernel)
    return None


def find_kernels(hardware: Hardware, setting: ExecutionSettings) -> dict[str, Kernel | None]:
    """Return the kernels of all operators of a model, by description of the operator."""
    model = hardware.architecture
    found = {
        f"products in {form}": find_kernel("products", form, hardware, setting)
        for form in {hardware.weights, hardware.attention}
    }
    found["attention"] = find_kernel("attention", hardware.kv, hardware, setting)
    if model.experts:
        name = f"experts in {hardware.experts}"
        found[name] = find_kernel("experts", hardware.experts, hardware, setting)
    return found
