"""Composed profiles that come with simkv, for those who have not installed the operator tables.

``packaged.json`` says of which hardware; ``make profiles`` writes them from the package's tables
alone, for vLLM's defaults, thinned to ``TOLERANCE``. Hardware of which there are no tables needs no
file: its profile is estimated from the data sheet when it is asked for.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from simkv.costs.hardware.catalog import find_architecture, find_gpu
from simkv.costs.hardware.hardware import Hardware, make_hardware
from simkv.costs.hardware.setting import EngineSetting
from simkv.costs.lines import between
from simkv.costs.operators.composed.host import host
from simkv.costs.profile import Profile
from simkv.schedulers.registry import DEFAULT

FOLDER = Path(__file__).with_name("profiles")
#: How far a thinned table may be from the whole one, as a share.
TOLERANCE = 0.01
#: What the profiles are composed for; another setting brings its own CUDA graphs and host time.
SETTING = EngineSetting(
    DEFAULT.name,
    "0.24.0",
    max_num_batched_tokens=8192,
    max_num_seqs=256,
    graph_sizes=(1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)),
)


@dataclass(frozen=True)
class Combination:
    """Hardware that there is a packaged answer for; ``path`` None: from the data sheet."""

    hardware: Hardware
    path: Path | None


@lru_cache(maxsize=1)
def combinations() -> tuple[Combination, ...]:
    """All popular combinations, in the order of ``packaged.json``."""
    found = []
    for row in json.loads(Path(__file__).with_name("packaged.json").read_text(encoding="utf-8")):
        hardware = hardware_of(row)
        path = path_of(hardware)
        found.append(Combination(hardware, path if path.is_file() else None))
    return tuple(found)


def hardware_of(row: dict[str, Any]) -> Hardware:
    """A row of ``packaged.json``."""
    rest = {name: value for name, value in row.items() if name not in ("gpu", "model")}
    return make_hardware(find_gpu(row["gpu"]), find_architecture(row["model"]), **rest)


def path_of(hardware: Hardware) -> Path:
    """Where the profile of exactly that hardware would be."""
    formats = [hardware.weights, hardware.attention, hardware.experts, f"kv {hardware.kv}"]
    split = [f"tp{hardware.tp}", f"ep{hardware.ep}", f"dp{hardware.dp}"]
    words = [hardware.gpu.name, hardware.architecture.name.rsplit("/", 1)[-1], *split, *formats]
    name = re.sub(r"[^a-z0-9.]+", "-", " ".join(words).lower())
    return FOLDER / f"{name}.json"


def packaged(hardware: Hardware, setting: EngineSetting) -> Profile | None:
    """The packaged profile for an engine's CUDA graphs and host; None if there is none."""
    path = path_of(hardware)
    if not path.is_file() or hardware.interconnect != hardware.gpu.interconnect():
        return None
    profile = Profile.model_validate_json(path.read_text(encoding="utf-8"))
    beside = host(hardware, setting)
    made_for = [f"composed for {profile.engine}"] if setting.engine != SETTING.engine else []
    return profile.model_copy(
        update={
            "engine": f"{setting.engine} {setting.release}",
            "terms": [*profile.terms, *beside.on_top],
            "floor": beside.floor or None,
            "graph_sizes": [] if setting.graph_mode == "eager" else list(setting.graph_sizes),
            "source": [*profile.source, *made_for, *beside.sources],
        }
    )


def thinned(profile: Profile) -> Profile:
    """The same with fewer points: those that lines between the others meet to ``TOLERANCE``."""
    terms = [
        term.model_copy(update={"table": _thin(term.table)}) if term.table else term
        for term in profile.terms
    ]
    return profile.model_copy(update={"terms": terms})


def _thin(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """As long as all between two points lie near the line, the points between are left out."""
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
        abs(between(y0, y1, (x - x0) / (x1 - x0)) - y) <= TOLERANCE * y
        for x, y in points[start + 1 : end]
    )


def written(profile: Profile) -> str:
    """A profile as it is packaged: JSON without blanks, whole numbers without a point."""
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
