"""Reader of Vidur's traces (``arrived_at, num_prefill_tokens, num_decode_tokens``) and lengths.

Files with only lengths have no arrival times, so the user must give a request rate. The older
replay files have ``Time, PromptTokenCount, CompletionTokenCount`` (github.com/microsoft/vidur,
data/).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from simkv.workload.column_values import parse_times, parse_whole_numbers
from simkv.workload.csv_columns import open_csv
from simkv.workload.formats.trace_format import TraceFormat
from simkv.workload.request_columns import RequestRows
from simkv.workload.trace_source import TraceSource, select_served

_NEW = ("arrived_at", "num_prefill_tokens", "num_decode_tokens")
_OLD = ("Time", "PromptTokenCount", "CompletionTokenCount")


def _read(source: TraceSource, names: tuple[str, str, str]) -> Iterator[RequestRows]:
    arrival, prompt, output = names
    with source.text() as lines:
        for table in open_csv(
            source,
            lines,
            {prompt: parse_whole_numbers, output: parse_whole_numbers},
            {arrival: parse_times},
        ):
            none = np.full(len(table.lines), np.nan)
            rows = RequestRows(table.columns.get(arrival, none), table[prompt], table[output])
            rows.number = table.numbers
            yield select_served(source, rows, table.lines)


def _rows(source: TraceSource) -> Iterator[RequestRows]:
    yield from _read(source, _NEW)


def _old_rows(source: TraceSource) -> Iterator[RequestRows]:
    yield from _read(source, _OLD)


VIDUR = TraceFormat(
    "vidur", "Vidur traces and lengths (CSV)", lambda head: head.has(*_NEW[1:]), _rows
)
VIDUR_OLD = TraceFormat(
    "vidur-replay", "Vidur's older replay files (CSV)", lambda head: head.has(*_OLD), _old_rows
)
