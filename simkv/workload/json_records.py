"""Read the records of a JSON lines file and report invalid ones."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from simkv.workload.column_values import MAX_SHOWN_CHARACTERS, ColumnArray, describe_found
from simkv.workload.request_columns import Ints
from simkv.workload.trace_source import TraceSource
from simkv.workload.workload_base import MAX_TOKEN_COUNT


@dataclass(frozen=True)
class JsonRecords:
    """Records of a JSON lines file, with their lines and row numbers."""

    records: list[dict[str, Any]]
    lines: list[int]
    numbers: Ints


def json_records(
    source: TraceSource, check: Callable[[dict[str, Any]], None], lines: Iterator[str]
) -> Iterator[JsonRecords]:
    """Yield the objects of a JSON lines file that pass ``check``.

    ``check`` raises ValueError if an object is invalid.
    """
    # The message is ``column: expected; found …``.
    for start, batch in source.batches(lines):
        records, at, numbers = [], [], []
        for line, text in enumerate(batch, start):
            if not text.strip():
                continue
            source.tally.rows += 1
            try:
                record = _json_object(text)
                check(record)
            except ValueError as error:
                column, _, what = str(error).partition(": ")
                source.bad(line, column, what)
                continue
            records.append(record)
            at.append(line)
            numbers.append(source.tally.rows - 1)
        yield JsonRecords(records, at, np.array(numbers, np.int64))


def json_documents(source: TraceSource, path: Path | None = None) -> Iterator[tuple[int, Any]]:
    """Yield the JSON values of a file with their line numbers."""
    # A file has one value per line, or one value in total.
    with source.text(path) as lines:
        begun: list[str] = []
        for start, batch in source.batches(lines):
            for line, text in enumerate(batch, start):
                if begun or not text.strip():
                    begun += [text] if begun else []
                    continue
                try:
                    yield line, json.loads(text)
                except (ValueError, RecursionError) as error:
                    if line > 1:
                        source.bad(line, "row", _no_json(error), path)
                    else:
                        begun = [text]
    if begun:
        try:
            yield 1, json.loads("".join(begun))
        except (ValueError, RecursionError) as error:
            raise source.error(_no_json(error), path=path) from error


def _no_json(error: Exception) -> str:
    return f"should be JSON; found {str(error)[:MAX_SHOWN_CHARACTERS]}"


def _json_object(text: str) -> dict[str, Any]:
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"row: should be a JSON object; found {str(error)[:MAX_SHOWN_CHARACTERS]}"
        ) from None
    if not isinstance(record, dict):
        raise ValueError(f"row: should be a JSON object; {describe_found(record)}")
    return record


def json_integer(record: dict[str, Any], name: str) -> int:
    """Return a field as an integer. Raises ValueError if it is not a non-negative integer."""
    value = record.get(name)
    if type(value) is int and 0 <= value <= MAX_TOKEN_COUNT:
        return value
    if isinstance(value, float) and value.is_integer() and 0 <= value <= MAX_TOKEN_COUNT:
        return int(value)
    what = "is missing" if name not in record else describe_found(value)
    raise ValueError(f"{name}: should be a whole number from 0 to {MAX_TOKEN_COUNT:,}; {what}")


def json_time(record: dict[str, Any], name: str) -> float:
    """Return a field as a number. Raises ValueError if it is not a non-negative number."""
    value = record.get(name)
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < np.inf:
        return value
    what = "is missing" if name not in record else describe_found(value)
    raise ValueError(f"{name}: should be a number of at least 0; {what}")


def json_ids(record: dict[str, Any], name: str) -> list[int]:
    """Return a field as a list. Raises ValueError if it is not a list of integers."""
    value = record.get(name)
    if isinstance(value, list) and all(type(item) is int and abs(item) < 1 << 62 for item in value):
        return value
    raise ValueError(f"{name}: should be a list of whole numbers; {describe_found(value)}")


def make_column(records: Iterable[Any], kind: npt.DTypeLike) -> ColumnArray:
    """Return Python values as a numpy column."""
    return np.array(list(records), kind)
