"""splitwise-sim: ``request_id, request_type, application_id, arrival_timestamp, batch_size, ...``.

``arrival_timestamp`` is in seconds, ``prompt_size`` and ``token_size`` in tokens
(github.com/Mutinifni/splitwise-sim, traces/). A row with a ``batch_size`` above 1 stands for that
many prompts at once, which simkv does not know as one request.
"""

from __future__ import annotations

from collections.abc import Iterator

from simkv.workload.cells import found, one_by_one, seconds, whole
from simkv.workload.rows import Rows
from simkv.workload.source import Source, served
from simkv.workload.tables import open_csv
from simkv.workload.traces.base import Format, Head


def _one_prompt(text: str) -> int:
    if text.strip() not in ("1", "1.0"):
        raise ValueError(f"should be 1, for a row is one request; {found(text)}")
    return 1


_NEEDED = {"arrival_timestamp": seconds, "prompt_size": whole, "token_size": whole}
_ALSO = {"batch_size": one_by_one(_one_prompt, int)}


def _rows(source: Source) -> Iterator[Rows]:
    with source.text() as lines:
        for table in open_csv(source, lines, _NEEDED, _ALSO):
            rows = Rows(table["arrival_timestamp"], table["prompt_size"], table["token_size"])
            rows.number = table.numbers
            yield served(source, rows, table.lines)


def _known(head: Head) -> bool:
    return head.has("arrival_timestamp", "prompt_size", "token_size")


SPLITWISE = Format("splitwise", "splitwise-sim traces (CSV)", _known, _rows)
