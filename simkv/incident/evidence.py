"""What the sources of an incident tell, each in the same few forms, and all of them joined.

Times are seconds since 1970 on the source's own clock, or from its first row where it has no wall
clock (``wall`` is false).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

#: Columns of ``series``: what a server tells of itself now and then. Rates are tokens per second
#: since the line before, shares from 0 to 1, ``preemptions`` and counts since the line before.
SERIES_COLUMNS = (
    "t_s",
    "engine",
    "running",
    "waiting",
    "usage",
    "prompt_rate",
    "output_rate",
    "hit_rate",
    "preemptions",
)
#: Columns of ``steps``: one row per iteration that a server logs; ``t_s`` is its end.
STEP_COLUMNS = (
    "t_s",
    "engine",
    "prefill_seqs",
    "prefill_tokens",
    "decode_seqs",
    "decode_tokens",
    "seconds",
    "usage",
)


@dataclass(frozen=True)
class StatedSetting:
    """A setting of the engine: its ``value``, and ``source_location`` that is told."""

    value: Any
    where: str


@dataclass(frozen=True)
class Evidence:
    """What one source tells, or several of one incident together.

    ``requests`` as ``read_measured`` gives them, with ``t_s`` for their arrival; ``arrivals`` are
    requests that were only seen to arrive (``request``, ``t_s``, ``max_tokens``, ``prompt_tokens``,
    0 where not told). ``engine`` is the engine's name, ``settings`` its own names of what it was
    started with. ``died`` is the line in which it says that it came to its end. ``notes`` are
    sentences on what was left out or assumed, ``lacks`` on what the source cannot tell.
    """

    source: str
    wall: bool = True
    engine: str | None = None
    settings: Mapping[str, StatedSetting] = field(default_factory=dict)
    requests: pd.DataFrame | None = None
    arrivals: pd.DataFrame | None = None
    series: pd.DataFrame | None = None
    steps: pd.DataFrame | None = None
    histograms: Mapping[str, Any] = field(default_factory=dict)
    died: str | None = None
    notes: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()


def sum_over_ranks(series: pd.DataFrame) -> pd.DataFrame:
    """Running and waiting of all ranks together, and the mean use of their caches, by time; a rank
    that tells nothing at some time is as it told before."""
    each = series.drop_duplicates(["t_s", "engine"], keep="last")
    found = {
        name: each.pivot(index="t_s", columns="engine", values=name).ffill()
        for name in ("running", "waiting", "usage")
    }
    summed = {name: found[name].sum(axis="columns") for name in ("running", "waiting")}
    return pd.DataFrame({**summed, "usage": found["usage"].mean(axis="columns")})


def source_location(path: Path, line: int) -> str:
    """``server.log:12``."""
    return f"{path.name}:{line}"


def tables(parts: Sequence[Evidence], name: str) -> list[pd.DataFrame]:
    """The tables of this name that the sources have."""
    return [getattr(part, name) for part in parts if getattr(part, name) is not None]
