"""The best that is known of what a step costs on some hardware.

In order: operator tables in folders of the user's, those of the installed package, a packaged
profile of exactly this GPU, model, parallelism and formats, and the data sheet.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from simkv.core.errors import InputError
from simkv.costs.hardware.catalog import Gpu
from simkv.costs.hardware.hardware import Hardware
from simkv.costs.hardware.setting import EngineSetting
from simkv.costs.operators.changed import with_constants
from simkv.costs.operators.compose import compose
from simkv.costs.operators.constants import Constants, constants_for
from simkv.costs.operators.measured.measured import Tables
from simkv.costs.operators.packaged import packaged
from simkv.costs.operators.roofline import Efficiency, Roofline, estimate_errors
from simkv.costs.operators.spreads import with_error
from simkv.costs.operators.tables import BACKENDS, TableStore, installed
from simkv.costs.profile import Fit, Profile


def profile_for(hardware: Hardware, setting: EngineSetting, tables: Sequence[Path] = ()) -> Profile:
    """The profile of an engine on some hardware; ``tables`` are folders to look into first.

    Composed once for each hardware and setting. Raises InputError for a folder that there is not,
    or in which nothing is of that GPU.
    """
    system = system_of(hardware.gpu)
    for folder in tables:
        if not (folder / system).is_dir():
            raise InputError(
                f"hardware: tables: {folder}: nothing is of {hardware.gpu.name}; expected "
                f"{folder}/{system}/FAMILY/BACKEND/VERSION/TABLE_perf.parquet"
            )
    return _profile_for(_Key(hardware, setting, tuple(tables)))


def system_of(gpu: Gpu) -> str:
    """The folder that operator tables of a GPU are in; its name in small letters if it is new."""
    return gpu.system or re.sub(r"[^a-z0-9]+", "_", gpu.name.lower())


def composed(
    hardware: Hardware,
    setting: EngineSetting,
    tables: Sequence[Path] = (),
    constants: Constants | None = None,
) -> Profile | None:
    """The profile from operator tables; None where no table has products of this GPU."""
    package = installed()
    roots = (*tables, *([package] if package else []))
    backend = setting.engine if setting.engine in BACKENDS else BACKENDS[0]
    store = TableStore(
        roots,
        system_of(hardware.gpu),
        backend,
        setting.release if backend == setting.engine else "9999",
    )
    if not store.has("gemm"):
        return None
    operators = Tables(store, Roofline(hardware.gpu, hardware.interconnect))
    changed = constants_for(hardware, setting) if constants is None else constants
    made = compose(hardware, setting, operators, ())
    read = ", ".join(operators.versions())
    whose = [*map(str, tables), *(["aiconfigurator (Apache-2.0)"] if package else [])]
    source = [f"operator tables of {', then '.join(whose)}, {store.system}: {read}"]
    if backend != setting.engine:
        source.append(f"operators of {backend}: there are none of {setting.engine}")
    made = made.model_copy(update={"source": [*source, *made.source]})
    return with_constants(made, changed)


def estimated(
    hardware: Hardware,
    setting: EngineSetting,
    constants: Constants | None = None,
    shares: Efficiency | None = None,
) -> Profile:
    """The profile from the GPU's data sheet, with ``shares`` of it that operators reach.

    Its error is that of the same estimate on measured GPUs, against their own tables.
    """
    operators = Roofline(hardware.gpu, hardware.interconnect, shares)
    changed = constants_for(hardware, setting) if constants is None else constants
    source = [f"data sheet of {hardware.gpu.name}: {hardware.gpu.source}"]
    made = compose(hardware, setting, operators, source, measured=False)
    fit = Fit(
        points=0,
        note="estimated from the data sheet; held_out are the errors of such estimates of measured "
        "GPUs, each with the shares of the others, against profiles composed of their tables",
        held_out=estimate_errors(),
    )
    return with_constants(made.model_copy(update={"fit": fit}), changed)


class _Key:
    """Hardware and setting as a key of a cache: they are equal if they say the same."""

    def __init__(
        self, hardware: Hardware, setting: EngineSetting, tables: tuple[Path, ...]
    ) -> None:
        self.hardware, self.setting, self.tables = hardware, setting, tables
        self._said = repr((hardware, setting, tables))

    def __hash__(self) -> int:
        return hash(self._said)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and self._said == other._said


@lru_cache(maxsize=64)
def _profile_for(key: _Key) -> Profile:
    found = composed(key.hardware, key.setting, key.tables)
    if found is None and (ready := packaged(key.hardware, key.setting)) is not None:
        found = with_constants(ready, constants_for(key.hardware, key.setting))
    found = found or estimated(key.hardware, key.setting)
    return with_error(found, key.hardware, key.setting)
