"""Read published measurement tables (CSV, Parquet) and settings (YAML)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from simkv.core.errors import InputError, spelling_hint
from simkv.core.input_files import MAX_TABLE_BYTES, check_input, read_text

ColumnKind = Literal["number", "whole", "text"]
RowPredicate = Callable[[pd.DataFrame], "pd.Series[bool]"]


def find_table(folder: Path, stem: str) -> Path:
    """Return the path of ``stem.csv`` or ``stem.csv.gz`` in ``folder``. Raises InputError if there
    is neither.
    """
    names = [f"{stem}.csv", f"{stem}.csv.gz"]
    for name in names:
        if (folder / name).is_file():
            return folder / name
    raise InputError(f"{folder}: contains neither {names[0]} nor {names[1]}")


def read_table(
    path: Path, columns: Mapping[str, ColumnKind], rows: RowPredicate | None = None
) -> pd.DataFrame:
    """Return columns of a CSV or Parquet file. Numbers must be finite and not negative.

    ``rows`` selects the rows to return. The index contains their row numbers. Raises InputError for
    an invalid value.
    """
    check_input(path, most=MAX_TABLE_BYTES)
    try:
        frame = pd.read_parquet(path) if path.suffix == ".parquet" else pd.read_csv(path)
    except (OSError, ValueError, EOFError) as error:
        raise InputError(f"{path}: cannot be read as a table: {_first_line(error)}") from error
    except ImportError as error:
        raise InputError(f"{path}: requires pyarrow: pip install 'simkv[parquet]'") from error
    for name in columns:
        if name not in frame:
            known = [str(column) for column in frame.columns]
            raise InputError(
                f"{path}: missing column {name!r}{spelling_hint(name, known)}; found "
                f"{', '.join(known)}"
            )
    if frame.empty:
        raise InputError(f"{path}: contains no rows")
    if rows is not None:
        frame = frame[rows(frame)]
    return frame[list(columns)].assign(
        **{name: _checked(path, frame[name], kind) for name, kind in columns.items()}
    )


def _checked(path: Path, column: pd.Series[Any], kind: ColumnKind) -> pd.Series[Any]:
    if kind == "text":
        return column.astype(str)
    values = pd.to_numeric(column, errors="coerce").astype(float)
    wrong = ~(np.isfinite(values) & (values >= 0))
    if kind == "whole":
        wrong |= values != values.round()
    if wrong.any():
        row = int(np.flatnonzero(wrong)[0])
        what = "a non-negative integer" if kind == "whole" else "a non-negative number"
        value = column.iloc[row]
        found = "nothing" if pd.isna(value) else repr(getattr(value, "item", lambda: value)())
        raise InputError(
            f"{path}:{column.index[row] + 2}: {column.name}: must be {what}, got {found}"
        )
    return values.astype(int) if kind == "whole" else values


def check_prefills_and_decodes(path: Path, prefills: object, decodes: object) -> None:
    """Check that an attention table has batches of prefills only and batches of decodes only.

    Raises InputError if either kind is missing.
    """
    for some, what in ((prefills, "a prefill"), (decodes, "decodes")):
        if not some:
            raise InputError(
                f"{path}: contains no row with only {what}; the fit requires rows with only "
                "prefills and rows with only decodes"
            )


def read_settings(path: Path) -> dict[str, Any]:
    """Return the settings in a YAML file. Raises InputError if the file is invalid."""
    try:
        found = YAML(typ="safe", pure=True).load(read_text(path))
    except (YAMLError, ValueError) as error:
        raise InputError(f"{path}: not valid YAML: {_first_line(error)}") from error
    if not isinstance(found, dict):
        raise InputError(f"{path}: must be a mapping of settings")
    return found


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
