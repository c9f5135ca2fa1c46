"""Evidence from the sources of an incident in common tables, and joined.

Times are seconds since 1970 on the source's own clock, or since its first row if it has no wall
clock (``wall`` is false).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from simkv.core.errors import InputError

#: Columns of ``series``: periodic statistics of a server. Rates are tokens per second since the
#: previous line, shares are from 0 to 1, ``preemptions`` and counts are since the previous line.
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
#: Columns of ``steps``: one row per logged iteration; ``t_s`` is its end.
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


class UndeterminedError(InputError):
    """The inputs are valid, but do not determine the workload; only a summary is possible."""


@dataclass(frozen=True)
class StatedSetting:
    """A setting of the engine: its ``value``, and the source location (``where``)."""

    value: Any
    where: str


@dataclass(frozen=True)
class Evidence:
    """Evidence from one source, or joined from several sources of one incident.

    ``requests`` is a table as returned by ``read_measured``, with arrival times in ``t_s``.
    ``arrivals`` lists requests with known arrival only (``request``, ``t_s``, ``max_tokens``,
    ``prompt_tokens``; unknown lengths are 0). ``access`` counts HTTP requests for tokens, between
    ``from_s`` and ``t_s``: ``accepted``, ``rejected`` (status 4xx) and ``failed`` (5xx). ``engine``
    is the engine's name, ``settings`` its start options under the engine's names. ``died`` is the
    log line of the engine's death. ``notes`` are sentences on omissions and assumptions, ``lacks``
    on missing information.
    """

    source: str
    wall: bool = True
    engine: str | None = None
    settings: Mapping[str, StatedSetting] = field(default_factory=dict)
    requests: pd.DataFrame | None = None
    arrivals: pd.DataFrame | None = None
    access: pd.DataFrame | None = None
    series: pd.DataFrame | None = None
    steps: pd.DataFrame | None = None
    histograms: Mapping[str, Any] = field(default_factory=dict)
    died: str | None = None
    notes: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()


def sum_over_ranks(series: pd.DataFrame) -> pd.DataFrame:
    """Sum running and waiting requests over ranks and average cache usage, by time.

    A rank without a value at some time keeps its previous value.
    """
    each = series.drop_duplicates(["t_s", "engine"], keep="last")
    found = {
        name: each.pivot(index="t_s", columns="engine", values=name).ffill()
        for name in ("running", "waiting", "usage")
    }
    summed = {name: found[name].sum(axis="columns") for name in ("running", "waiting")}
    return pd.DataFrame({**summed, "usage": found["usage"].mean(axis="columns")})


def source_location(path: Path, line: int) -> str:
    """Return a source location such as ``server.log:12``."""
    return f"{path.name}:{line}"


def tables(parts: Sequence[Evidence], name: str) -> list[pd.DataFrame]:
    """Return the tables of this name that the sources have."""
    return [getattr(part, name) for part in parts if getattr(part, name) is not None]
