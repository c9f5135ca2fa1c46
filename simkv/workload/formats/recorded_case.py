"""Reader of the ``requests.csv`` of a recorded case: one row per request with measured results.

The columns are ``arrival_s``, ``prompt_tokens``, ``output_tokens``; measured results are not read.
``shared_prefix_tokens``, if present, is the length of a prefix shared by all prompts. If a column
``stage`` exists, only prompts of the same stage share a prefix. The reason is that guidellm samples
a new prefix for each stage, so the real server computed the first prompt of each stage completely.
A file ``prefix_blocks.jsonl[.gz]`` in the same directory lists the full 16-token blocks of each
prompt: ``{"id": 0, "hash_ids": [0, 1]}``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from simkv.workload.column_values import make_column_parser, parse_times, parse_whole_numbers
from simkv.workload.csv_columns import CsvTable, open_csv
from simkv.workload.formats.trace_format import FileHead, TraceFormat
from simkv.workload.json_records import json_ids, json_integer, json_records
from simkv.workload.request_columns import (
    HASH_STREAM,
    NAMED_STREAM,
    PromptPieces,
    RequestRows,
)
from simkv.workload.trace_source import TraceSource, select_served

BLOCK_TOKENS = 16
_NEEDED = {
    "arrival_s": parse_times,
    "prompt_tokens": parse_whole_numbers,
    "output_tokens": parse_whole_numbers,
}
_ALSO = {
    "id": parse_whole_numbers,
    "shared_prefix_tokens": parse_whole_numbers,
    "stage": make_column_parser(str),
}


def _rows(source: TraceSource) -> Iterator[RequestRows]:
    blocks = _blocks(source)
    with source.text() as lines:
        for table in open_csv(source, lines, _NEEDED, _ALSO):
            rows = RequestRows(table["arrival_s"], table["prompt_tokens"], table["output_tokens"])
            rows.number = table.numbers
            rows.pieces = _pieces(source, table, blocks)
            yield select_served(source, rows, table.lines)


def _pieces(
    source: TraceSource, table: CsvTable, blocks: dict[int, list[int]]
) -> PromptPieces | None:
    if "shared_prefix_tokens" in table.columns:
        shared = table["shared_prefix_tokens"].tolist()
        stages = table.columns.get("stage", [""] * len(shared))
        streams = [source.streams.number(f"gcommon {stage}".rstrip()) for stage in stages]
        return PromptPieces.of(
            [
                [(NAMED_STREAM, name, 0, n)] if n else []
                for name, n in zip(streams, shared, strict=True)
            ]
        )
    if not blocks or "id" not in table.columns:
        return None
    return PromptPieces.of(
        [
            [(HASH_STREAM, name, 0, BLOCK_TOKENS) for name in blocks.get(number, ())][
                : prompt // BLOCK_TOKENS
            ]
            for number, prompt in zip(
                table["id"].tolist(), table["prompt_tokens"].tolist(), strict=True
            )
        ]
    )


def _check(record: dict[str, Any]) -> None:
    json_integer(record, "id")
    json_ids(record, "hash_ids")


def _blocks(source: TraceSource) -> dict[int, list[int]]:
    """Return the prompt blocks of each request by its id."""
    for end in ("", ".gz"):
        path = source.path.with_name(f"prefix_blocks.jsonl{end}")
        if path.is_file():
            beside = TraceSource(path)
            with beside.text() as lines:
                return {
                    record["id"]: record["hash_ids"]
                    for some in json_records(beside, _check, lines)
                    for record in some.records
                }
    return {}


def _known(head: FileHead) -> bool:
    return head.has("arrival_s", "prompt_tokens", "output_tokens")


CASE = TraceFormat("case", "requests.csv of a recorded case (CSV)", _known, _rows)
