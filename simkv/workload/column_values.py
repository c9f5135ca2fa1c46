"""Parsers for the fields of traces, for whole columns or for single fields."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from simkv.workload.request_columns import Floats, Ints
from simkv.workload.workload_base import MAX_TOKEN_COUNT

#: Maximum length of a quoted value in an error message.
MAX_SHOWN_CHARACTERS = 60

ColumnArray = npt.NDArray[Any]


def parse_whole_numbers(texts: Sequence[str]) -> Ints:
    """Return integers from 0 to MAX_TOKEN_COUNT. Raises ValueError if a field is invalid."""
    try:
        values = np.fromiter(map(int, texts), np.int64, len(texts))
    except (ValueError, OverflowError):
        values = np.fromiter((parse_whole_number(text) for text in texts), np.int64, len(texts))
    outside = len(values) and (values.min() < 0 or values.max() > MAX_TOKEN_COUNT)
    if outside or "_" in "".join(texts):
        return np.fromiter((parse_whole_number(text) for text in texts), np.int64, len(texts))
    return values


def parse_whole_number(text: str) -> int:
    """Return an integer from 0 to MAX_TOKEN_COUNT. Raises ValueError if the text is invalid."""
    # ``12.0`` is accepted.
    try:
        value = float(text)
        fine = value.is_integer() and 0 <= value <= MAX_TOKEN_COUNT and "_" not in text
    except ValueError:
        fine = False
    if not fine:
        raise ValueError(
            f"should be a whole number from 0 to {MAX_TOKEN_COUNT:,}; {describe_found(text)}"
        )
    return int(value)


def parse_times(texts: Sequence[str]) -> Floats:
    """Return non-negative numbers. Raises ValueError if a field is invalid."""
    try:
        values = np.fromiter(map(float, texts), np.float64, len(texts))
    except ValueError:
        values = np.array([np.nan])
    outside = len(values) and not (values.min() >= 0 and values.max() < np.inf)
    if outside or "_" in "".join(texts):
        return np.fromiter((parse_time(text) for text in texts), np.float64, len(texts))
    return values


def parse_time(text: str) -> float:
    """Return a non-negative number. Raises ValueError if the text is invalid."""
    try:
        value = float(text)
        fine = 0 <= value < np.inf and "_" not in text
    except ValueError:
        fine = False
    if not fine:
        raise ValueError(f"should be a number of at least 0; {describe_found(text)}")
    return value


def describe_found(value: Any) -> str:
    """Return the text ``found 'x'``, with long values shortened."""
    text = repr(value).encode(errors="backslashreplace").decode()
    return (
        f"found {text}"
        if len(text) <= MAX_SHOWN_CHARACTERS
        else f"found {text[:MAX_SHOWN_CHARACTERS]}…"
    )


Parser = Callable[[Sequence[str]], ColumnArray]


def make_column_parser(parse: Callable[[str], Any], kind: npt.DTypeLike = object) -> Parser:
    """Return a parser of columns that applies ``parse`` to each field."""

    def column(texts: Sequence[str]) -> ColumnArray:
        values = np.empty(len(texts), kind)
        for index, text in enumerate(texts):
            values[index] = parse(text)
        return values

    return column
