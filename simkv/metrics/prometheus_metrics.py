"""What an engine registers with Prometheus of what is modelled: names, types, labels and buckets.

That is data, read from its wheel (``exported/<engine>.json``, made by ``dev/engine_metrics.py``);
each row says which measure of ours it stands for.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from simkv.core.engine_spec import EngineConfig
from simkv.schedulers.engine_registry import find_engine_spec

FOLDER = Path(__file__).parent / "exported"


@dataclass(frozen=True)
class EngineMetric:
    """A metric of an engine: all its ``labels``, those last that are its own (``extra``)."""

    name: str
    kind: str
    measure: str
    labels: Sequence[str]
    extra: Sequence[str]
    buckets: Sequence[float] | None

    @property
    def help(self) -> str:
        """Its name in words."""
        return self.name.partition(":")[2].replace("_", " ")


def list_engine_metrics(
    engine: str, config: EngineConfig | None = None, *, several: bool = False
) -> list[EngineMetric]:
    """What an engine registers of what is modelled; names of our own if nobody has read its.

    More with a ``config`` that has a knob on which some depend; some have a label more where there
    are ``several`` replicas.
    """
    path = FOLDER / f"{engine}.json"
    data = json.loads((path if path.exists() else FOLDER / "simkv.json").read_text())
    rows = []
    more = [part for part in data.get("when", []) if getattr(config, part["knob"], None)]
    for row in [*data["metrics"], *(row for part in more for row in part["metrics"])]:
        common = list(data["labels"][row["of"]])
        own = [label for label in row["labels"] if label not in common]
        if len(own) < len(row["labels"]):  # it names all that it has
            common = [label for label in row["labels"] if label in common]
        if several and (rank := data.get("rank", {}).get(row["of"])):
            common.append(rank)
        labels = [*common, *own]
        buckets = row.get("buckets")
        rows.append(EngineMetric(row["name"], row["type"], row["measure"], labels, own, buckets))
    return rows


def config_info_metric(engine: str) -> tuple[str, list[str]] | None:
    """The gauge of an engine that tells its knobs, and which of them."""
    path = FOLDER / f"{engine}.json"
    found = json.loads(path.read_text()).get("info") if path.exists() else None
    return (found["name"], found["knobs"]) if found else None


@dataclass(frozen=True)
class LoraInfo:
    """The gauge of an engine that tells which adapters are asked for, of at most so many."""

    name: str
    labels: Sequence[str]
    most: str


def lora_info(config: EngineConfig) -> LoraInfo | None:
    """Its gauge; None where it has none, or takes no adapters."""
    path = FOLDER / f"{config.name}.json"
    found = json.loads(path.read_text()).get("lora") if path.exists() else None
    if found is None or not find_engine_spec(config).takes_loras(config):
        return None
    return LoraInfo(found["name"], found["labels"], str(getattr(config, found["knob"])))


def bucket_bounds(rows: Sequence[EngineMetric], longest: int) -> dict[str, Sequence[float]]:
    """The buckets of each measure; those of token counts end at the longest request (1, 2, 5)."""
    steps = [m * 10**e for e in range(12) for m in (1, 2, 5) if m * 10**e <= longest]
    return {row.measure: row.buckets or steps for row in rows if row.kind == "histogram"}
