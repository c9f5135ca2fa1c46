"""What the host takes for a step: beside the GPU where it schedules ahead, else before it.

``host.json`` has the seconds, each with its source.
"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path

from pydantic import TypeAdapter

from simkv.costs.data import Data
from simkv.costs.hardware.hardware import Hardware
from simkv.costs.hardware.setting import EngineSetting
from simkv.costs.profile import Term

PATH = Path(__file__).parents[1] / "host.json"


class HostTime(Data):
    """Seconds of an engine's host: a step, a sequence of it, a layer that is launched by hand.

    Without ``asynchronous`` they are of either way to schedule.
    """

    engine: str
    asynchronous: bool | None = None
    step_s: float = 0.0
    seq_s: float = 0.0
    eager_layer_s: float = 0.0
    source: str


@lru_cache(maxsize=1)
def host_times() -> tuple[HostTime, ...]:
    """All that is known."""
    data = json.loads(PATH.read_text(encoding="utf-8"))
    return tuple(TypeAdapter(list[HostTime]).validate_python(data))


def host(hardware: Hardware, setting: EngineSetting) -> tuple[list[Term], list[str]]:
    """Terms that come on top of the GPU's time, and their sources."""
    terms: list[Term] = []
    sources = []
    eager = setting.graph_mode in ("eager", "full decode only")
    for known in host_times():
        if known.engine != setting.engine:
            continue
        if known.asynchronous not in (None, setting.asynchronous):
            continue
        made = _terms(known, hardware.architecture.depth if eager else 0)
        terms += made
        sources += [f"host: {known.source}"] if made else []
    return terms, sources


def _terms(known: HostTime, launched: int) -> list[Term]:
    terms = []
    if known.step_s:
        terms.append(Term(name="host, a step", feature="steps", seconds=known.step_s))
    if known.seq_s:
        for feature in ("decode_seqs", "prefill_seqs"):
            terms.append(Term(name="host, a sequence", feature=feature, seconds=known.seq_s))
    if known.eager_layer_s and launched:
        terms.append(
            Term(
                name="launching the layers of a prefill",
                feature="steps",
                when="prefill",
                seconds=known.eager_layer_s * launched,
            )
        )
    return terms
