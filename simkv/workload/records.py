"""The records of a JSON lines file, and which of them cannot be used."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from simkv.workload.cells import SHOWN, Column, found
from simkv.workload.fields import MOST_TOKENS
from simkv.workload.rows import Ints
from simkv.workload.source import Source


@dataclass(frozen=True)
class Records:
    """Some records of a JSON lines file, and their lines."""

    records: list[dict[str, Any]]
    lines: list[int]
    numbers: Ints


def json_records(
    source: Source, check: Callable[[dict[str, Any]], None], lines: Iterator[str]
) -> Iterator[Records]:
    """The objects of a JSON lines file that ``check`` finds nothing wrong with.

    ``check`` raises ValueError as ``column: what would be right; found …``.
    """
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
        yield Records(records, at, np.array(numbers, np.int64))


def _json_object(text: str) -> dict[str, Any]:
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"row: should be a JSON object; found {str(error)[:SHOWN]}") from None
    if not isinstance(record, dict):
        raise ValueError(f"row: should be a JSON object; {found(record)}")
    return record


def json_whole(record: dict[str, Any], name: str) -> int:
    """A field with a whole number from 0. Raises ValueError saying what is wrong."""
    value = record.get(name)
    if type(value) is int and 0 <= value <= MOST_TOKENS:
        return value
    if isinstance(value, float) and value.is_integer() and 0 <= value <= MOST_TOKENS:
        return int(value)
    what = "is missing" if name not in record else found(value)
    raise ValueError(f"{name}: should be a whole number from 0 to {MOST_TOKENS:,}; {what}")


def json_time(record: dict[str, Any], name: str) -> float:
    """A field with a number from 0. Raises ValueError saying what is wrong."""
    value = record.get(name)
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < np.inf:
        return value
    what = "is missing" if name not in record else found(value)
    raise ValueError(f"{name}: should be a number from 0; {what}")


def json_ids(record: dict[str, Any], name: str) -> list[int]:
    """A field with a list of whole numbers. Raises ValueError saying what is wrong."""
    value = record.get(name)
    if isinstance(value, list) and all(type(item) is int and abs(item) < 1 << 62 for item in value):
        return value
    raise ValueError(f"{name}: should be a list of whole numbers; {found(value)}")


def column_of(records: Iterable[Any], kind: npt.DTypeLike) -> Column:
    """A numpy column from Python values."""
    return np.array(list(records), kind)
