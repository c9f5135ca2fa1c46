"""Packaged profiles, composed from operator tables, for users without these tables.

``packaged.json`` lists the hardware. ``make profiles`` writes the profiles with the default
settings of vLLM and the tables of the package aiconfigurator-core. Points that interpolation
reproduces within ``TOLERANCE`` are removed. Hardware without operator tables has no file; its
profile is estimated from the data sheet on request.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from simkv.costs.cost_profile import CostProfile
from simkv.costs.hardware.execution_settings_lookup import ExecutionSettings
from simkv.costs.hardware.model_gpu_catalog import find_architecture, find_gpu
from simkv.costs.hardware.replica_hardware import Hardware, make_hardware
from simkv.costs.interpolation import lerp
from simkv.costs.operators.kernel_table import find_kernels
from simkv.costs.operators.step_parts.host_time import find_host_terms
from simkv.schedulers.engine_registry import DEFAULT

PROFILES_DIR = Path(__file__).with_name("profiles")
#: Maximum relative error of a thinned table.
TOLERANCE = 0.01
#: Engine settings of the packaged profiles; for other settings, the CUDA graphs and the host time
#: of the profile are replaced.
PACKAGED_SETTING = ExecutionSettings(
    DEFAULT.name,
    "0.24.0",
    max_num_batched_tokens=8192,
    max_num_seqs=256,
    graph_sizes=(1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)),
)


@dataclass(frozen=True)
class PackagedCombination:
    """Hardware in ``packaged.json``, and the ``path`` of its profile.

    ``path`` is None if the profile is estimated from the data sheet.
    """

    hardware: Hardware
    path: Path | None


@lru_cache(maxsize=1)
def combinations() -> tuple[PackagedCombination, ...]:
    """Return all combinations in ``packaged.json``, in the order of the file."""
    found = []
    for row in json.loads(Path(__file__).with_name("packaged.json").read_text(encoding="utf-8")):
        hardware = parse_packaged_hardware(row)
        path = composed_profile_path(hardware)
        found.append(PackagedCombination(hardware, path if path.is_file() else None))
    return tuple(found)


def parse_packaged_hardware(row: dict[str, Any]) -> Hardware:
    """Build the hardware of an entry of ``packaged.json``."""
    rest = {name: value for name, value in row.items() if name not in ("gpu", "model")}
    return make_hardware(find_gpu(row["gpu"]), find_architecture(row["model"]), **rest)


def composed_profile_path(hardware: Hardware) -> Path:
    """Return the path of the packaged profile for the hardware. The file may not exist."""
    formats = [hardware.weights, hardware.attention, hardware.experts, f"kv {hardware.kv}"]
    split = [f"tp{hardware.tp}", f"ep{hardware.ep}", f"dp{hardware.dp}"]
    words = [hardware.gpu.name, hardware.architecture.name.rsplit("/", 1)[-1], *split, *formats]
    name = re.sub(r"[^a-z0-9.]+", "-", " ".join(words).lower())
    return PROFILES_DIR / f"{name}.json"


def load_composed_profile(hardware: Hardware, setting: ExecutionSettings) -> CostProfile | None:
    """Return the packaged profile for the hardware, or None if there is none.

    ``setting`` determines the CUDA graphs and the host time of the profile.
    """
    path = composed_profile_path(hardware)
    if not path.is_file() or hardware.interconnect != hardware.gpu.interconnect():
        return None
    profile = CostProfile.model_validate_json(path.read_text(encoding="utf-8"))
    beside = find_host_terms(hardware, setting)
    made_for = (
        [f"composed for {profile.engine}"] if setting.engine != PACKAGED_SETTING.engine else []
    )
    packaged = find_kernels(replace(hardware, kernels=()), PACKAGED_SETTING)
    others = [
        kernel.name
        for operator, kernel in find_kernels(hardware, setting).items()
        if kernel and kernel != packaged[operator]
    ]
    return profile.model_copy(
        update={
            "fit": profile.fit.model_copy(update={"unmeasured_kernels": others}),
            "engine": f"{setting.engine} {setting.release}",
            "terms": [*profile.terms, *beside.on_top],
            "floor": beside.floor or None,
            "graph_sizes": [] if setting.graph_mode == "eager" else list(setting.graph_sizes),
            "source": [*profile.source, *made_for, *beside.sources],
        }
    )


def thin_profile(profile: CostProfile) -> CostProfile:
    """Return the profile with fewer points in its tables.

    Interpolation reproduces the removed points within ``TOLERANCE``.
    """
    terms = [
        term.model_copy(update={"table": _thin(term.table)}) if term.table else term
        for term in profile.terms
    ]
    return profile.model_copy(update={"terms": terms})


def _thin(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Remove points that interpolation reproduces within ``TOLERANCE``."""
    kept = [points[0]]
    start = 0
    while start < len(points) - 1:
        end = start + 1
        while end + 1 < len(points) and _near(points, start, end + 1):
            end += 1
        kept.append(points[end])
        start = end
    return kept


def _near(points: list[tuple[float, float]], start: int, end: int) -> bool:
    (x0, y0), (x1, y1) = points[start], points[end]
    return all(
        abs(lerp(y0, y1, (x - x0) / (x1 - x0)) - y) <= TOLERANCE * y
        for x, y in points[start + 1 : end]
    )


def format_profile(profile: CostProfile) -> str:
    """Format a profile as compact JSON. Integers have no decimal point."""
    data = profile.model_dump(mode="json", exclude_none=True)
    return json.dumps(_short(data), separators=(",", ":")) + "\n"


def _short(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_short(item) for item in value]
    if isinstance(value, dict):
        return {name: _short(item) for name, item in value.items()}
    return value
