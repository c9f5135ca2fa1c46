"""Search for packaged profiles, and for models and GPUs with composed costs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from simkv.core.errors import InputError
from simkv.core.execution_settings import ExecutionSettings
from simkv.costs.cost_profile import load_profile, packaged_profiles
from simkv.costs.hardware.kv_capacity import compute_kv_capacity
from simkv.costs.hardware.model_architecture import Architecture
from simkv.costs.hardware.model_gpu_catalog import (
    Gpu,
    architectures,
    gpus,
    other_names,
)
from simkv.costs.hardware.replica_hardware import Hardware, make_hardware
from simkv.costs.operators.composed_profiles import PACKAGED_SETTING, combinations
from simkv.costs.operators.composition import describe_layout
from simkv.costs.operators.error_sources import describe_error
from simkv.costs.operators.operator_tables import find_installed_tables
from simkv.schedulers.engine_registry import DEFAULT

DATA_SHEET_BASIS = "estimated from the data sheet"
#: Numbers of GPUs to try in the search for the minimum that holds a model.
GPU_COUNTS = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class KnownCost:
    """Available step costs: a packaged profile, or a model and a GPU with composed costs.

    ``name`` is empty for composed costs. ``fits`` is the minimum number of GPUs that can hold the
    model, or None. ``error`` is a text about the error of step times. ``hardware`` is the section
    of a scenario that selects these costs; it is empty for a packaged profile.
    """

    name: str
    model: str
    gpu: str
    fits: int | None
    basis: str
    error: str
    hardware: Mapping[str, Any] = field(default_factory=dict)


def find_known_costs(words: Sequence[str] = ()) -> list[KnownCost]:
    """Return all costs whose description contains all ``words``, ignoring case and order."""
    wanted = [_squeezed(word) for word in words]
    found: list[KnownCost] = []
    for name in packaged_profiles():
        one = _packaged(name)
        if _has(wanted, name, one.model, one.gpu, one.basis, ""):
            found.append(one)
    found += list(_combined(wanted))
    for model in architectures():
        for gpu in gpus():
            basis = find_cost_basis(gpu)
            also = " ".join((*other_names(model.name), *gpu.also, gpu.system or ""))
            if _has(wanted, "", model.name, gpu.name, basis, also):
                error, fits = _error(model, gpu, basis), find_min_gpus(model, gpu)
                section: dict[str, Any] = {"gpu": gpu.name, "model": model.name}
                section |= {"tp": fits} if fits and fits > 1 else {}
                found.append(KnownCost("", model.name, gpu.name, fits, basis, error, section))
    return found


def find_cost_basis(gpu: Gpu) -> str:
    """Return the basis of costs on the GPU: measured operators if installed, or the data sheet."""
    tables = find_installed_tables()
    measured = tables and gpu.system and _measured(tables, gpu.system)
    return "composed of measured operators" if measured else DATA_SHEET_BASIS


@lru_cache(maxsize=64)
def _measured(tables: Path, system: str) -> bool:
    return any((tables / system).glob("gemm/*/*/*.parquet"))


@lru_cache(maxsize=4096)
def find_min_gpus(model: Architecture, gpu: Gpu) -> int | None:
    """Return the smallest number of GPUs (1 to 16) that can hold the model and 8,192 tokens of KV.

    Returns None if 16 GPUs are too few.
    """
    setting = ExecutionSettings(
        DEFAULT.name, DEFAULT.config().variant, 8192, 256, memory_share=0.92
    )
    for tp in GPU_COUNTS:
        try:
            room = compute_kv_capacity(make_hardware(gpu, model, tp=tp), setting)
        except InputError:  # the number of heads is not divisible by this number of GPUs
            continue
        if room.num_gpu_blocks * setting.block_size >= 8192:
            return tp
    return None


def _combined(wanted: Sequence[str]) -> Iterator[KnownCost]:
    """Yield the composed costs whose profile is packaged with simkv."""
    for one in combinations():
        hardware = one.hardware
        if one.path is None:
            continue
        model, gpu, rest = hardware.architecture.name, hardware.gpu, describe_layout(hardware)
        also = " ".join((*other_names(model), *gpu.also, gpu.system or "", rest))
        basis = f"composed of measured operators, packaged: {rest}"
        if _has(wanted, "", model, gpu.name, basis, also):
            error = describe_error(hardware, PACKAGED_SETTING) or "not known"
            section = make_section(hardware)
            yield KnownCost("", model, gpu.name, hardware.tp, basis, error, section)


def make_section(hardware: Hardware) -> dict[str, Any]:
    """Return the ``hardware`` section of a scenario for this hardware, without fields that have
    their default.
    """
    found: dict[str, Any] = {"gpu": hardware.gpu.name, "model": hardware.architecture.name}
    default = make_hardware(hardware.gpu, hardware.architecture)
    for name in ("tp", "ep", "dp", "weights", "attention", "experts", "kv"):
        value = getattr(hardware, name)
        if value != getattr(default, name):
            found[name] = value
        if name == "weights":  # this format is the default of attention and experts
            default = make_hardware(
                hardware.gpu, hardware.architecture, weights=found.get("weights")
            )
    return found


def _error(model: Architecture, gpu: Gpu, basis: str) -> str:
    hardware, estimated = make_hardware(gpu, model), basis == DATA_SHEET_BASIS
    return describe_error(hardware, PACKAGED_SETTING, data_sheet=estimated) or "not known"


def _packaged(name: str) -> KnownCost:
    profile = load_profile(name)
    errors = profile.fit.held_out
    error = ", ".join(f"{kind} {100 * one.p95:.0f} %" for kind, one in errors.items())
    return KnownCost(name, profile.model, profile.gpu, None, profile.basis, error or "not known")


def _has(wanted: Sequence[str], *texts: str) -> bool:
    whole = " ".join(_squeezed(part) for text in texts for part in _parts(text))
    return all(word in whole for word in wanted)


def _parts(text: str) -> Iterator[str]:
    """Yield a text and each of its words, so that ``llama 70b`` matches ``llama-3.1-70b``."""
    yield text
    yield from text.split()


def _squeezed(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.casefold())
