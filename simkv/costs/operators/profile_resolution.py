"""Select the best available cost profile for some hardware.

The order of preference is: operator tables in the user's directories, operator tables of the
installed package, a packaged profile of exactly this GPU, model, parallelism and number formats,
and the data sheet.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from simkv.core.errors import InputError
from simkv.costs.cost_profile import CostProfile, FitQuality
from simkv.costs.hardware.execution_settings_lookup import ExecutionSettings
from simkv.costs.hardware.model_gpu_catalog import Gpu
from simkv.costs.hardware.replica_hardware import Hardware
from simkv.costs.operators.calibration_rules import (
    CostConstants,
    apply_constants,
    find_constants,
)
from simkv.costs.operators.composed_profiles import load_composed_profile
from simkv.costs.operators.composition import compose
from simkv.costs.operators.error_sources import add_error_sources, find_kernel_source
from simkv.costs.operators.kernel_table import find_kernels
from simkv.costs.operators.lookup.operator_lookup import MeasuredOperators
from simkv.costs.operators.operator_tables import BACKENDS, TableStore, find_installed_tables
from simkv.costs.operators.roofline import Efficiency, Roofline, estimate_errors


def resolve_profile(
    hardware: Hardware, setting: ExecutionSettings, tables: Sequence[Path] = ()
) -> CostProfile:
    """Return the cost profile of an engine on some hardware. The result is cached.

    ``tables`` are the user's directories, which are searched first. Raises InputError if a
    directory is missing or has no tables of the GPU.
    """
    system = find_system(hardware.gpu)
    for folder in tables:
        if not (folder / system).is_dir():
            raise InputError(
                f"hardware: tables: {folder}: no tables of {hardware.gpu.name}; expected "
                f"{folder}/{system}/FAMILY/BACKEND/VERSION/TABLE_perf.parquet"
            )
    return _profile_for(_Key(hardware, setting, tuple(tables)))


def find_system(gpu: Gpu) -> str:
    """Return the directory name of a GPU's operator tables, by default its name in lower case."""
    return gpu.system or re.sub(r"[^a-z0-9]+", "_", gpu.name.lower())


def compose_from_tables(
    hardware: Hardware,
    setting: ExecutionSettings,
    tables: Sequence[Path] = (),
    constants: CostConstants | None = None,
) -> CostProfile | None:
    """Return the profile from operator tables.

    Returns None if the tables contain no matrix products measured on the GPU.
    """
    package = find_installed_tables()
    roots = (*tables, *([package] if package else []))
    backend = setting.engine if setting.engine in BACKENDS else BACKENDS[0]
    store = TableStore(
        roots,
        find_system(hardware.gpu),
        backend,
        setting.release if backend == setting.engine else "9999",
    )
    if not store.has("gemm"):
        return None
    sheet, kernels = Roofline(hardware.gpu, hardware.interconnect), find_kernels(hardware, setting)
    operators = MeasuredOperators(store, sheet, kernels)
    changed = find_constants(hardware, setting) if constants is None else constants
    made = compose(hardware, setting, operators, ())
    read = ", ".join(operators.versions())
    whose = [*map(str, tables), *(["aiconfigurator (Apache-2.0)"] if package else [])]
    source = [f"operator tables of {', then '.join(whose)}, {store.system}: {read}"]
    if backend != setting.engine:
        source.append(f"operators of {backend}, because no tables of {setting.engine} exist")
    fit = made.fit.model_copy(
        update={
            "unmeasured_kernels": list(operators.unmeasured),
            "sources": find_kernel_source(made, operators.expert_spread),
        }
    )
    made = made.model_copy(update={"source": [*source, *made.source], "fit": fit})
    return apply_constants(made, changed)


def estimate_from_data_sheet(
    hardware: Hardware,
    setting: ExecutionSettings,
    constants: CostConstants | None = None,
    shares: Efficiency | None = None,
) -> CostProfile:
    """Return the profile estimated from the GPU's data sheet.

    ``shares`` are the fractions of the data sheet's rates that operators reach.
    """
    operators = Roofline(hardware.gpu, hardware.interconnect, shares)
    changed = find_constants(hardware, setting) if constants is None else constants
    source = [f"data sheet of {hardware.gpu.name}: {hardware.gpu.source}"]
    made = compose(hardware, setting, operators, source, measured=False)
    fit = FitQuality(
        points=0,
        note="estimated from the data sheet; held_out are errors of the same estimate for measured "
        "GPUs against their operator tables, each with efficiencies from the other GPUs",
        held_out=estimate_errors(),
    )
    return apply_constants(made.model_copy(update={"fit": fit}), changed)


class _Key:
    """Cache key for hardware and engine settings, compared by ``repr``."""

    def __init__(
        self, hardware: Hardware, setting: ExecutionSettings, tables: tuple[Path, ...]
    ) -> None:
        self.hardware, self.setting, self.tables = hardware, setting, tables
        self._said = repr((hardware, setting, tables))

    def __hash__(self) -> int:
        return hash(self._said)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and self._said == other._said


@lru_cache(maxsize=64)
def _profile_for(key: _Key) -> CostProfile:
    found = compose_from_tables(key.hardware, key.setting, key.tables)
    if found is None and (ready := load_composed_profile(key.hardware, key.setting)) is not None:
        found = apply_constants(ready, find_constants(key.hardware, key.setting))
    found = found or estimate_from_data_sheet(key.hardware, key.setting)
    return add_error_sources(found, key.hardware, key.setting)
