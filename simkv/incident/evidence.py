"""Evidence: the data of all sources of an incident, as tables with common columns.

Times are in seconds since 1970 on the clock of the source, or since its first row if ``wall`` is
false.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from simkv.core.errors import InputError

#: Source of a setting that no input states.
INFERRED = "inferred from the statistics lines"
#: Columns of ``series``, the periodic statistics of a server. Rates are in tokens per second since
#: the previous line, shares are from 0 to 1, and ``preemptions`` and other counts are since the
#: previous line.
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
#: Columns of ``steps``, which has one row per logged iteration; ``t_s`` is the end of the
#: iteration.
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
    """Raised if the inputs are valid but do not determine the workload."""


@dataclass(frozen=True)
class StatedSetting:
    """A setting of the engine that a source reports.

    ``where`` names the source and line, such as ``server.log:12``.
    """

    value: Any
    where: str


@dataclass(frozen=True)
class Evidence:
    """Evidence from one source, or from all sources of one incident.

    ``requests`` is a table as returned by ``read_measured_latencies``, with arrival times in
    ``t_s``. ``arrivals`` lists requests without a measured answer; an unknown length is 0.
    ``access`` counts the accepted, rejected (status 4xx) and failed (status 5xx) HTTP requests from
    ``from_s`` to ``t_s``. ``settings`` contains the engine's start options. ``died`` is the log
    line that reports the end of the engine process. ``notes`` contains sentences about assumptions,
    and ``lacks`` about missing information.
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
    """Return the running and waiting requests, summed over ranks, and the mean cache usage by time.

    A missing value of a rank is replaced by its last value.
    """
    each = series.drop_duplicates(["t_s", "engine"], keep="last")
    found = {
        name: each.pivot(index="t_s", columns="engine", values=name).ffill()
        for name in ("running", "waiting", "usage")
    }
    summed = {name: found[name].sum(axis="columns") for name in ("running", "waiting")}
    return pd.DataFrame({**summed, "usage": found["usage"].mean(axis="columns")})


def source_location(path: Path, line: int) -> str:
    """Return a position in a source as text, such as ``server.log:12``."""
    return f"{path.name}:{line}"


def tables(parts: Sequence[Evidence], name: str) -> list[pd.DataFrame]:
    """Return the table ``name`` of each source that has it."""
    return [getattr(part, name) for part in parts if getattr(part, name) is not None]
