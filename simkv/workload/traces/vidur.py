"""Vidur's traces (``arrived_at, num_prefill_tokens, num_decode_tokens``) and lengths.

Files of lengths have no arrivals; the user gives a request rate. The older replay files have
``Time, PromptTokenCount, CompletionTokenCount`` (github.com/microsoft/vidur, data/).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from simkv.workload.cells import seconds, whole
from simkv.workload.rows import Rows
from simkv.workload.source import Source, served
from simkv.workload.tables import open_csv
from simkv.workload.traces.base import Format

_NEW = ("arrived_at", "num_prefill_tokens", "num_decode_tokens")
_OLD = ("Time", "PromptTokenCount", "CompletionTokenCount")


def _read(source: Source, names: tuple[str, str, str]) -> Iterator[Rows]:
    arrival, prompt, output = names
    with source.text() as lines:
        for table in open_csv(source, lines, {prompt: whole, output: whole}, {arrival: seconds}):
            none = np.full(len(table.lines), np.nan)
            rows = Rows(table.columns.get(arrival, none), table[prompt], table[output])
            rows.number = table.numbers
            yield served(source, rows, table.lines)


def _rows(source: Source) -> Iterator[Rows]:
    yield from _read(source, _NEW)


def _old_rows(source: Source) -> Iterator[Rows]:
    yield from _read(source, _OLD)


VIDUR = Format("vidur", "Vidur traces and lengths (CSV)", lambda head: head.has(*_NEW[1:]), _rows)
VIDUR_OLD = Format(
    "vidur-replay", "Vidur's older replay files (CSV)", lambda head: head.has(*_OLD), _old_rows
)
