"""Reader of BurstGPT, versions 1 to 3: ``Timestamp, Model, Request tokens, Response tokens, ...``.

Columns are found by name because version 3 inserts ``Session ID`` and ``Elapsed time``
(github.com/HPMLL/BurstGPT). ``Timestamp`` is in seconds since the midnight before the first day.
Failed requests (0 response tokens) and rows without request tokens are left out and counted.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from simkv.workload.column_values import (
    ColumnArray,
    make_column_parser,
    parse_times,
    parse_whole_numbers,
)
from simkv.workload.csv_columns import open_csv
from simkv.workload.formats.trace_format import FileHead, TraceFormat
from simkv.workload.request_columns import Ints, RequestRows
from simkv.workload.trace_source import TraceSource, select_served

_NEEDED = {
    "Timestamp": parse_times,
    "Request tokens": parse_whole_numbers,
    "Response tokens": parse_whole_numbers,
}


def _rows(source: TraceSource) -> Iterator[RequestRows]:
    with source.text() as lines:
        for table in open_csv(source, lines, _NEEDED, {"Session ID": make_column_parser(str)}):
            sessions = table.columns.get("Session ID")
            rows = RequestRows(
                arrival=table["Timestamp"],
                prompt_tokens=table["Request tokens"],
                output_tokens=table["Response tokens"],
                session=None if sessions is None else session_numbers(source, sessions),
                number=table.numbers,
            )
            yield select_served(source, rows, table.lines)


def session_numbers(source: TraceSource, names: ColumnArray) -> Ints:
    """Return the number of each session in ``names``, or -1 for an empty name."""
    number = source.sessions.number
    return np.array([number(name) if name else -1 for name in names], np.int64)


def _known(head: FileHead) -> bool:
    return head.has("Timestamp", "Model", "Request tokens", "Response tokens")


BURSTGPT = TraceFormat("burstgpt", "BurstGPT, versions 1 to 3 (CSV)", _known, _rows)
