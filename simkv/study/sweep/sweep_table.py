"""The table of a sweep: a row per run, with its knobs and all figures."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pandas as pd

from simkv.core.atomic_files import write_bytes
from simkv.core.figure_registry import METRICS, figure
from simkv.study.simulation_job import Summary
from simkv.study.sweep.sweep import Sweep


def build_sweep_table(sweep: Sweep, summaries: Mapping[str, Summary]) -> pd.DataFrame:
    """``point``, the knobs, ``variant``, ``repeat`` and ``seed``, then the figures of summary.json.

    Figures in groups are named with dots, as in ``e2e_ms.p99``. A latency of which there is no
    sample, because nothing finished, is empty: 0 would be the best of all. A knob that a variant
    sets itself is as the variant has it.
    """
    rows = [
        {
            "point": run.point,
            **run.knobs,
            **run.own,
            "variant": run.variant,
            "repeat": run.repeat,
            "seed": run.seed,
            **flatten_figures(summaries[run.job.digest]),
        }
        for run in sweep.runs
    ]
    return make_typed_frame(rows)


def make_typed_frame(rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Rows as a table in which whole numbers stay whole, where others are missing too."""
    frame = pd.DataFrame(list(rows), dtype=object)
    return pd.DataFrame({name: _typed(frame[name]) for name in frame})


def list_knobs(frame: pd.DataFrame) -> list[str]:
    """The knobs of a sweep, by its table."""
    names = [str(name) for name in frame]
    return names[names.index("point") + 1 : names.index("variant")]


def _flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values by names with dots; a list of words as lines of one text."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            flat.update({f"{name}.{key}": found for key, found in _flat(value).items()})
        elif isinstance(value, list):
            words = all(isinstance(item, str) for item in value)
            flat[name] = "\n".join(value) if words else json.dumps(value)
        else:
            flat[name] = value
    return flat


def flatten_figures(summary: Summary) -> dict[str, Any]:
    """The figures of a variant by names with dots; a list of words as lines of one text.

    A figure without a sample is None.
    """
    flat = _flat(summary)
    return flat | {name: figure(summary, name) for name in METRICS if name in flat}


def _typed(column: pd.Series[Any]) -> pd.Series[Any]:
    """A column of numbers as numbers; one of mixed kinds stays as it is."""
    kinds = {type(value) for value in column if value is not None}
    if kinds == {int}:
        whole: pd.Series[Any] = column.astype("Int64" if column.isna().any() else "int64")
        return whole
    if kinds and kinds <= {int, float}:
        return column.astype("float64")
    return column.astype("bool") if kinds == {bool} and not column.isna().any() else column


def write_table(frame: pd.DataFrame, folder: Path, name: str = "table") -> list[Path]:
    """Write ``build_sweep_table.csv``, and ``build_sweep_table.parquet`` if pyarrow is there;
    returns what was written."""
    paths = [folder / f"{name}.csv"]
    write_bytes(paths[0], frame.to_csv(index=False, lineterminator="\n").encode())
    if find_spec("pyarrow"):
        paths.append(folder / f"{name}.parquet")
        plain = pd.DataFrame({name: _of_one_kind(frame[name]) for name in frame})
        write_bytes(paths[1], plain.to_parquet(index=False, engine="pyarrow"))
    return paths


def _of_one_kind(column: pd.Series[Any]) -> pd.Series[Any]:
    """Parquet has no columns of mixed kinds: their values become words."""
    if column.dtype != object or len({type(v) for v in column if v is not None}) <= 1:
        return column
    return column.map(lambda value: None if value is None else str(value))
