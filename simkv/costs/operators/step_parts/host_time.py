"""Host time that does not overlap with the work of the GPU, and lower bounds of the step time.

``host.json`` lists the durations with their sources.
"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from pydantic import TypeAdapter

from simkv.costs.cost_profile import CostTerm
from simkv.costs.frozen_model import FrozenModel
from simkv.costs.hardware.execution_settings_lookup import ExecutionSettings
from simkv.costs.hardware.replica_hardware import Hardware

HOST_TIMES_PATH = Path(__file__).parents[1] / "host.json"


class HostTime(FrozenModel):
    """Host time of an engine in seconds: per step, per sequence, and per layer outside a CUDA
    graph.

    ``asynchronous`` is None if the values apply to both synchronous and asynchronous scheduling.
    ``mixture_layer_s`` is a lower bound of the time per layer with a mixture of experts.
    """

    engine: str
    asynchronous: bool | None = None
    step_s: float = 0.0
    seq_s: float = 0.0
    eager_layer_s: float = 0.0
    mixture_layer_s: float = 0.0
    source: str


@lru_cache(maxsize=1)
def host_times() -> tuple[HostTime, ...]:
    """Return all entries of ``host.json``."""
    data = json.loads(HOST_TIMES_PATH.read_text(encoding="utf-8"))
    return tuple(TypeAdapter(list[HostTime]).validate_python(data))


class HostTerms(NamedTuple):
    """Cost terms of the host.

    The terms in ``on_top`` are added to the GPU's time. The sum of the terms in ``floor`` is a
    lower bound of the step time. ``sources`` lists the sources of the values.
    """

    on_top: list[CostTerm]
    floor: list[CostTerm]
    sources: list[str]


def find_host_terms(hardware: Hardware, setting: ExecutionSettings) -> HostTerms:
    """Return the host terms of an engine for the model; empty if no values are known."""
    found = HostTerms([], [], [])
    eager = setting.graph_mode in ("eager", "full decode only")
    for known in host_times():
        if known.engine != setting.engine:
            continue
        if known.asynchronous not in (None, setting.asynchronous):
            continue
        model = hardware.architecture
        made = _terms(known, model.depth if eager else 0)
        least = _launching(known.mixture_layer_s, model.depth if eager and model.experts else 0)
        found.on_top.extend(made)
        found.floor.extend(least)
        found.sources.extend([f"host: {known.source}"] if made or least else [])
    return found


def _terms(known: HostTime, launched: int) -> list[CostTerm]:
    terms = []
    if known.step_s:
        terms.append(CostTerm(name="host, a step", feature="steps", seconds=known.step_s))
    if known.seq_s:
        for feature in ("decode_seqs", "prefill_seqs"):
            terms.append(CostTerm(name="host, a sequence", feature=feature, seconds=known.seq_s))
    return terms + _launching(known.eager_layer_s, launched)


def _launching(each: float, layers: int) -> list[CostTerm]:
    if not each * layers:
        return []
    name = "launching the layers of a prefill"
    return [CostTerm(name=name, feature="steps", when="prefill", seconds=each * layers)]
