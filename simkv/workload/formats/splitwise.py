"""Reader of splitwise-sim traces: ``request_id, request_type, application_id, ...``.

``arrival_timestamp`` is in seconds, ``prompt_size`` and ``token_size`` are in tokens
(github.com/Mutinifni/splitwise-sim, traces/). Rows with a ``batch_size`` above 1 are rejected,
because they represent several prompts and a simkv request has only one.
"""

from __future__ import annotations

from collections.abc import Iterator

from simkv.workload.column_values import (
    describe_found,
    make_column_parser,
    parse_times,
    parse_whole_numbers,
)
from simkv.workload.csv_columns import open_csv
from simkv.workload.formats.trace_format import FileHead, TraceFormat
from simkv.workload.request_columns import RequestRows
from simkv.workload.trace_source import TraceSource, select_served


def _one_prompt(text: str) -> int:
    if text.strip() not in ("1", "1.0"):
        raise ValueError(f"should be 1, because a row is one request; {describe_found(text)}")
    return 1


_NEEDED = {
    "arrival_timestamp": parse_times,
    "prompt_size": parse_whole_numbers,
    "token_size": parse_whole_numbers,
}
_ALSO = {"batch_size": make_column_parser(_one_prompt, int)}


def _rows(source: TraceSource) -> Iterator[RequestRows]:
    with source.text() as lines:
        for table in open_csv(source, lines, _NEEDED, _ALSO):
            rows = RequestRows(
                table["arrival_timestamp"], table["prompt_size"], table["token_size"]
            )
            rows.number = table.numbers
            yield select_served(source, rows, table.lines)


def _known(head: FileHead) -> bool:
    return head.has("arrival_timestamp", "prompt_size", "token_size")


SPLITWISE = TraceFormat("splitwise", "splitwise-sim traces (CSV)", _known, _rows)
