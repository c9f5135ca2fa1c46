"""Names, types, labels and buckets of the engines' Prometheus metrics that simkv models.

``dev/engine_metrics.py`` generates the data (``exported/<engine>.json``) from the released code of
each engine. Each entry names the measured quantity.
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
    """Prometheus metric of an engine.

    ``kind`` is the Prometheus type. ``measure`` is the measured quantity. ``labels`` contains all
    labels, and ``extra`` contains the labels that only this metric has.
    """

    name: str
    kind: str
    measure: str
    labels: Sequence[str]
    extra: Sequence[str]
    buckets: Sequence[float] | None

    @property
    def help(self) -> str:
        """Help text of the metric: its name without prefix, in words."""
        return self.name.partition(":")[2].replace("_", " ")


def list_engine_metrics(
    engine: str, config: EngineConfig | None = None, *, several: bool = False
) -> list[EngineMetric]:
    """Return the metrics of an engine that simkv models, or simkv's own metrics for other engines.

    ``config`` adds metrics that exist only with certain engine options. ``several`` adds labels
    that exist only with several replicas.
    """
    path = FOLDER / f"{engine}.json"
    data = json.loads((path if path.exists() else FOLDER / "simkv.json").read_text())
    rows = []
    more = [part for part in data.get("when", []) if getattr(config, part["knob"], None)]
    for row in [*data["metrics"], *(row for part in more for row in part["metrics"])]:
        common = list(data["labels"][row["of"]])
        own = [label for label in row["labels"] if label not in common]
        if len(own) < len(row["labels"]):  # this row lists all labels of the metric
            common = [label for label in row["labels"] if label in common]
        if several and (rank := data.get("rank", {}).get(row["of"])):
            common.append(rank)
        labels = [*common, *own]
        buckets = row.get("buckets")
        rows.append(EngineMetric(row["name"], row["type"], row["measure"], labels, own, buckets))
    return rows


def config_info_metric(engine: str) -> tuple[str, list[str]] | None:
    """Return the name of the gauge with the engine's options, and the option names, or None."""
    path = FOLDER / f"{engine}.json"
    found = json.loads(path.read_text()).get("info") if path.exists() else None
    return (found["name"], found["knobs"]) if found else None


@dataclass(frozen=True)
class LoraInfo:
    """Gauge of an engine that lists the LoRA adapters of current requests.

    ``most`` is the maximum number of adapters, as the value of a label.
    """

    name: str
    labels: Sequence[str]
    most: str


def lora_info(config: EngineConfig) -> LoraInfo | None:
    """Return the gauge for LoRA adapters, or None if there is none or LoRA is disabled."""
    path = FOLDER / f"{config.name}.json"
    found = json.loads(path.read_text()).get("lora") if path.exists() else None
    if found is None or not find_engine_spec(config).takes_loras(config):
        return None
    return LoraInfo(found["name"], found["labels"], str(getattr(config, found["knob"])))


def bucket_bounds(rows: Sequence[EngineMetric], longest: int) -> dict[str, Sequence[float]]:
    """Return the bucket bounds of each histogram, by the measured quantity.

    Histograms without known bounds use 1, 2, 5, 10, 20, 50 and so on, up to ``longest``.
    """
    steps = [m * 10**e for e in range(12) for m in (1, 2, 5) if m * 10**e <= longest]
    return {row.measure: row.buckets or steps for row in rows if row.kind == "histogram"}
