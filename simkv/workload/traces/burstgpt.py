"""BurstGPT, versions 1 to 3: ``Timestamp, Model, Request tokens, Response tokens, ...``.

Columns are found by name, for version 3 puts ``Session ID`` and ``Elapsed time`` in between
(github.com/HPMLL/BurstGPT). ``Timestamp`` is in seconds from the midnight before the first day.
Failed requests have 0 response tokens; they are left out and counted, as are rows without request
tokens.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from simkv.workload.cells import Column, one_by_one, seconds, whole
from simkv.workload.rows import Ints, Rows
from simkv.workload.source import Source, served
from simkv.workload.tables import open_csv
from simkv.workload.traces.base import Format, Head

_NEEDED = {"Timestamp": seconds, "Request tokens": whole, "Response tokens": whole}


def _rows(source: Source) -> Iterator[Rows]:
    with source.text() as lines:
        for table in open_csv(source, lines, _NEEDED, {"Session ID": one_by_one(str)}):
            sessions = table.columns.get("Session ID")
            rows = Rows(
                arrival=table["Timestamp"],
                prompt_tokens=table["Request tokens"],
                output_tokens=table["Response tokens"],
                session=None if sessions is None else session_numbers(source, sessions),
                number=table.numbers,
            )
            yield served(source, rows, table.lines)


def session_numbers(source: Source, names: Column) -> Ints:
    """Sessions by number; an empty name is none."""
    number = source.sessions.number
    return np.array([number(name) if name else -1 for name in names], np.int64)


def _known(head: Head) -> bool:
    return head.has("Timestamp", "Model", "Request tokens", "Response tokens")


BURSTGPT = Format("burstgpt", "BurstGPT, versions 1 to 3 (CSV)", _known, _rows)
