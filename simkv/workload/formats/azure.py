"""Reader of the Azure LLM inference traces of 2023 and 2024, and the multimodal trace of 2025.

The columns are ``TIMESTAMP, ContextTokens, GeneratedTokens``, and ``NumImages`` in 2025
(github.com/Azure/AzurePublicDataset). Timestamps are wall-clock times, with or without a fraction
and an offset from UTC; the first row is time 0.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import numpy as np

from simkv.workload.column_values import describe_found, parse_whole_numbers
from simkv.workload.csv_columns import open_csv
from simkv.workload.formats.trace_format import FileHead, TraceFormat
from simkv.workload.request_columns import Ints, RequestRows
from simkv.workload.trace_source import TraceSource, select_served

_TIME = re.compile(
    r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d(?::?\d\d)?)?", re.ASCII
)
_ZONE = re.compile(r"(?:Z|[+-]\d\d(?::?\d\d)?)$", re.ASCII)
#: Length of "2023-11-16 18:15:46".
_SHORTEST = 19
#: Range of years that 64-bit nanoseconds cover (1677 to 2262).
_FIRST_YEAR, _LAST_YEAR = "1700", "2200"


def parse_timestamps(texts: Sequence[str]) -> Ints:
    """Return wall-clock times in nanoseconds since 1970. Raises ValueError if a time is invalid."""
    zone = _ZONE.search(texts[0][_SHORTEST:]) if texts else None
    suffix = zone[0] if zone else ""
    bare = [text.removesuffix(suffix) for text in texts] if suffix else texts
    try:
        joined = "".join(bare)
        zoned = "+" in joined or "Z" in joined or joined.count("-") != 2 * len(bare)
        if zoned or min(map(len, bare), default=_SHORTEST) < _SHORTEST:
            raise ValueError
        if min(bare, default="") < _FIRST_YEAR or max(bare, default="") > _LAST_YEAR:
            raise ValueError
        values = np.array(bare, "datetime64[ns]").astype(np.int64)
    except ValueError:
        return np.fromiter((parse_timestamp(text) for text in texts), np.int64, len(texts))
    return values - _offset(suffix)


def parse_timestamp(text: str) -> int:
    """Return a wall-clock time in nanoseconds since 1970.

    Raises ValueError if the text is invalid.
    """
    parts = _TIME.fullmatch(text.strip())
    try:
        if not parts:
            raise ValueError
        whole_seconds = int(np.datetime64(parts[1], "s").astype(np.int64))
    except ValueError:
        raise ValueError(
            f"should be a time like 2023-11-16 18:15:46.6805900; {describe_found(text)}"
        ) from None
    if not _FIRST_YEAR <= text.strip() < _LAST_YEAR:
        raise ValueError(
            f"should be a time from {_FIRST_YEAR} to {_LAST_YEAR}; {describe_found(text)}"
        )
    fraction = int((parts[2] or "0").ljust(9, "0"))
    return whole_seconds * 1_000_000_000 + fraction - _offset(parts[3] or "")


def _offset(zone: str) -> int:
    """Return the offset of a time zone from UTC in nanoseconds."""
    digits = zone.strip("Z+-").replace(":", "").ljust(4, "0")
    minutes = 60 * int(digits[:2]) + int(digits[2:])
    return (-minutes if zone.startswith("-") else minutes) * 60_000_000_000


def _rows(source: TraceSource) -> Iterator[RequestRows]:
    needed = {
        "TIMESTAMP": parse_timestamps,
        "ContextTokens": parse_whole_numbers,
        "GeneratedTokens": parse_whole_numbers,
    }
    with source.text() as lines:
        for table in open_csv(source, lines, needed, {"NumImages": parse_whole_numbers}):
            images = table.columns.get("NumImages")
            rows = RequestRows(
                arrival=source.since_first(table["TIMESTAMP"]) / 1e9,
                prompt_tokens=table["ContextTokens"],
                output_tokens=table["GeneratedTokens"],
                has_images=None if images is None else images > 0,
                number=table.numbers,
            )
            yield select_served(source, rows, table.lines)


def _known(head: FileHead) -> bool:
    return head.has("TIMESTAMP", "ContextTokens", "GeneratedTokens")


AZURE = TraceFormat("azure", "Azure LLM inference traces 2023, 2024, 2025 (CSV)", _known, _rows)
