"""Read measured requests from a CSV or JSON Lines file with custom column names.

    simkv diagnose server.log requests.csv --columns arrival=ts,prompt_tokens=in,output_tokens=out

Points in time may be seconds since 1970, milliseconds since 1970 or ISO 8601. The name of a latency
column contains its unit.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pandas as pd

from simkv.core.errors import InputError, spelling_hint
from simkv.core.input_files import MAX_TABLE_BYTES, check_input
from simkv.incident.evidence import Evidence

#: Columns that can be mapped, and their meaning.
REQUIRED = ("arrival", "prompt_tokens", "output_tokens")
LATENCIES = ("queue", "prefill", "ttft", "tpot", "e2e")
OPTIONAL = ("request", "session", "max_tokens", "cached_tokens")
KNOWN = (
    *REQUIRED,
    *(f"{name}_{unit}" for name in LATENCIES for unit in ("ms", "s")),
    *OPTIONAL,
)
#: Times above this value are interpreted as milliseconds since 1970.
_MILLISECONDS = 1e11


def parse_record_columns(text: str) -> dict[str, str]:
    """Parse ``name=column,...``. Each ``name`` is a column name of simkv.

    Raises InputError if a name is unknown, missing or given twice.
    """
    found: dict[str, str] = {}
    for pair in text.split(","):
        ours, equals, theirs = (part.strip() for part in pair.partition("="))
        if not equals or not theirs:
            raise InputError(f"--columns {text}: expected FIELD=COLUMN, such as arrival=ts")
        if ours not in KNOWN:
            raise InputError(
                f"--columns {text}: unknown column {ours!r}{spelling_hint(ours, KNOWN)}; expected "
                f"{', '.join(KNOWN)}"
            )
        if ours in found:
            raise InputError(f"--columns {text}: {ours} is given twice")
        found[ours] = theirs
    if missing := [name for name in REQUIRED if name not in found]:
        raise InputError(f"--columns {text}: missing {', '.join(missing)}")
    return found


def is_mapped(path: Path, columns: Mapping[str, str]) -> bool:
    """Return whether a file has at least one of the columns in ``columns``."""
    return path.is_file() and any(name in _names(path) for name in columns.values())


def _names(path: Path) -> list[str]:
    with path.open(encoding="utf-8-sig", errors="replace") as text:
        first = text.readline(1 << 20).strip()
    if first.startswith("{"):
        try:
            return list(json.loads(first))
        except ValueError:
            return []
    return [name.strip().strip('"') for name in first.split(",")]


def read_mapped(path: Path, columns: Mapping[str, str]) -> Evidence:
    """Read the requests in a file with custom column names.

    Raises InputError for missing columns and invalid values.
    """
    check_input(path, most=MAX_TABLE_BYTES)
    names = _names(path)
    for ours, theirs in columns.items():
        if theirs not in names:
            raise InputError(
                f"{path}: --columns {ours}={theirs}: no such column{spelling_hint(theirs, names)}; "
                f"found {', '.join(names)}"
            )
    table = _table(path)
    requests = pd.DataFrame({"t_s": _times(path, table, columns["arrival"])})
    for name in ("prompt_tokens", "output_tokens"):
        requests[name] = _numbers(path, table, columns[name]).fillna(0).astype(np.int64)
    for name in LATENCIES:
        requests[f"{name}_ms"] = np.nan
        for unit, factor in (("ms", 1.0), ("s", 1e3)):
            if f"{name}_{unit}" in columns:
                own = _numbers(path, table, columns[f"{name}_{unit}"])
                requests[f"{name}_ms"] = own * factor
    for name in set(OPTIONAL).intersection(columns):
        is_number = name.endswith("tokens")
        text = table[columns[name]].astype(str)
        requests[name] = _numbers(path, table, columns[name]) if is_number else text
    if requests["tpot_ms"].isna().all():
        rest = (requests["e2e_ms"] - requests["ttft_ms"]) / (requests["output_tokens"] - 1)
        requests["tpot_ms"] = rest.where(requests["output_tokens"] > 1)
    if not requests["output_tokens"].gt(0).any():
        raise InputError(f"{path}: none of the {len(requests)} requests has output tokens")
    wall = bool(requests["t_s"].min() > 1e9)
    return Evidence(
        path.name,
        wall=wall,
        requests=requests.sort_values("t_s", kind="stable", ignore_index=True),
        lacks=() if "queue_ms" in columns else (f"{path.name} has no queue times of requests",),
    )


def _table(path: Path) -> pd.DataFrame:
    try:
        with path.open(encoding="utf-8-sig", errors="replace") as text:
            is_json = text.read(1) == "{"
        return pd.read_json(path, lines=True) if is_json else pd.read_csv(path)
    except (ValueError, OSError) as error:
        raise InputError(f"{path}: {str(error).splitlines()[0]}") from error


def _numbers(path: Path, table: pd.DataFrame, name: str) -> pd.Series[float]:
    """Return a column as numbers. Raises InputError with the line of the first invalid value."""
    values = pd.to_numeric(table[name], errors="coerce")
    bad = values.isna() & table[name].notna() | (values < 0)
    if bad.any():
        row = int(np.flatnonzero(bad)[0])
        raise InputError(
            f"{path}: row {row + 1}: {name}: expected a number of at least 0, got "
            f"{table[name].iloc[row]!r}"
        )
    return values.astype(float)


def _times(path: Path, table: pd.DataFrame, name: str) -> pd.Series[float]:
    """Return a column of points in time, in seconds since 1970."""
    values = pd.to_numeric(table[name], errors="coerce")
    if values.notna().all():
        return (values / 1e3).where(values > _MILLISECONDS, values).astype(float)
    dates = pd.to_datetime(table[name], utc=True, errors="coerce", format="ISO8601")
    if dates.isna().any():
        row = int(np.flatnonzero(dates.isna())[0])
        raise InputError(
            f"{path}: row {row + 1}: {name}: expected seconds or an ISO 8601 time, got "
            f"{table[name].iloc[row]!r}"
        )
    return (dates - pd.Timestamp(0, tz="UTC")).dt.total_seconds()
