"""Build the table of a sweep: one row per run, with its settings and all metrics."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pandas as pd

from simkv.core.atomic_files import write_bytes
from simkv.core.figure_registry import METRICS, SESSION_METRICS, figure
from simkv.costs.cost_profile import StepError
from simkv.metrics.fidelity import mark_step_times
from simkv.study.simulation_job import Summary
from simkv.study.sweep.sweep import Sweep


def build_sweep_table(sweep: Sweep, summaries: Mapping[str, Summary]) -> pd.DataFrame:
    """Return one row per run, with its settings, ``variant``, ``repeat``, ``seed`` and all metrics.

    Nested metrics have dotted names, such as ``e2e_ms.p99``. A latency without a value is empty.
    ``step_times`` is the origin and the typical error of the step times.
    """
    rows = [
        {
            "point": run.point,
            **run.knobs,
            **run.variant_knobs,
            "variant": run.variant,
            "repeat": run.repeat,
            "seed": run.seed,
            **flatten_figures(summaries[run.job.digest]),
            "step_times": _mark(summaries[run.job.digest]),
        }
        for run in sweep.runs
    ]
    return make_typed_frame(rows)


def _mark(summary: Summary) -> str:
    """Return a label with the origin and the error of the step times, such as ``composed ±11
    %``.
    """
    fidelity = summary["fidelity"]
    errors = {kind: StepError(**error) for kind, error in fidelity["step_errors"].items()}
    return mark_step_times(fidelity["basis"], errors)


def make_typed_frame(rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Return a table in which integer columns stay integers even if values are missing."""
    frame = pd.DataFrame(list(rows), dtype=object)
    return pd.DataFrame({name: _typed(frame[name]) for name in frame})


def list_knobs(frame: pd.DataFrame) -> list[str]:
    """Return the settings of a sweep, which are columns of its table."""
    names = [str(name) for name in frame]
    return names[names.index("point") + 1 : names.index("variant")]


def _flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested values as a flat mapping with dotted names. A list of strings becomes one
    text.
    """
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
    """Return the metrics of a variant as a flat mapping with dotted names.

    A latency without samples is None.
    """
    flat = _flat(summary)
    return flat | {
        name: figure(summary, name) for name in (*METRICS, *SESSION_METRICS) if name in flat
    }


def _typed(column: pd.Series[Any]) -> pd.Series[Any]:
    """Convert a column of numbers to a numeric type. Columns of mixed types are unchanged."""
    kinds = {type(value) for value in column if value is not None}
    if kinds == {int}:
        whole: pd.Series[Any] = column.astype("Int64" if column.isna().any() else "int64")
        return whole
    if kinds and kinds <= {int, float}:
        return column.astype("float64")
    return column.astype("bool") if kinds == {bool} and not column.isna().any() else column


def write_table(frame: pd.DataFrame, folder: Path, name: str = "table") -> list[Path]:
    """Write ``name.csv``, and ``name.parquet`` if pyarrow is installed. Return the paths."""
    paths = [folder / f"{name}.csv"]
    write_bytes(paths[0], frame.to_csv(index=False, lineterminator="\n").encode())
    if find_spec("pyarrow"):
        paths.append(folder / f"{name}.parquet")
        plain = pd.DataFrame({name: _of_one_kind(frame[name]) for name in frame})
        write_bytes(paths[1], plain.to_parquet(index=False, engine="pyarrow"))
    return paths


def _of_one_kind(column: pd.Series[Any]) -> pd.Series[Any]:
    """Convert a column of mixed types to text, as Parquet requires."""
    if column.dtype != object or len({type(v) for v in column if v is not None}) <= 1:
        return column
    return column.map(lambda value: None if value is None else str(value))
