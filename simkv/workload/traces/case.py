"""Requests of a recorded case, one row each, with what was measured: ``requests.csv``.

``arrival_s``, ``prompt_tokens``, ``output_tokens``; other columns are results and are not read.
``shared_prefix_tokens``, if there, begin every prompt alike, or with a column ``stage`` every
prompt of a stage: guidellm draws another prefix for each (in the recorded runs the first prompt of
each stage is computed whole). A file ``prefix_blocks.jsonl[.gz]``
beside it names the full blocks of 16 tokens of each prompt: ``{"id": 0, "hash_ids": [0, 1]}``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from simkv.workload.cells import one_by_one, seconds, whole
from simkv.workload.records import json_ids, json_records, json_whole
from simkv.workload.rows import HASH, NAME, Pieces, Rows
from simkv.workload.source import Source, served
from simkv.workload.tables import Table, open_csv
from simkv.workload.traces.base import Format, Head

BLOCK = 16
_NEEDED = {"arrival_s": seconds, "prompt_tokens": whole, "output_tokens": whole}
_ALSO = {"id": whole, "shared_prefix_tokens": whole, "stage": one_by_one(str)}


def _rows(source: Source) -> Iterator[Rows]:
    blocks = _blocks(source)
    with source.text() as lines:
        for table in open_csv(source, lines, _NEEDED, _ALSO):
            rows = Rows(table["arrival_s"], table["prompt_tokens"], table["output_tokens"])
            rows.number = table.numbers
            rows.pieces = _pieces(source, table, blocks)
            yield served(source, rows, table.lines)


def _pieces(source: Source, table: Table, blocks: dict[int, list[int]]) -> Pieces | None:
    if "shared_prefix_tokens" in table.columns:
        shared = table["shared_prefix_tokens"].tolist()
        stages = table.columns.get("stage", [""] * len(shared))
        streams = [source.streams.number(f"gcommon {stage}".rstrip()) for stage in stages]
        return Pieces.of(
            [[(NAME, name, 0, n)] if n else [] for name, n in zip(streams, shared, strict=True)]
        )
    if not blocks or "id" not in table.columns:
        return None
    return Pieces.of(
        [
            [(HASH, name, 0, BLOCK) for name in blocks.get(number, ())][: prompt // BLOCK]
            for number, prompt in zip(
                table["id"].tolist(), table["prompt_tokens"].tolist(), strict=True
            )
        ]
    )


def _check(record: dict[str, Any]) -> None:
    json_whole(record, "id")
    json_ids(record, "hash_ids")


def _blocks(source: Source) -> dict[int, list[int]]:
    """The blocks of each prompt by the request's id."""
    for end in ("", ".gz"):
        path = source.path.with_name(f"prefix_blocks.jsonl{end}")
        if path.is_file():
            beside = Source(path)
            with beside.text() as lines:
                return {
                    record["id"]: record["hash_ids"]
                    for some in json_records(beside, _check, lines)
                    for record in some.records
                }
    return {}


def _known(head: Head) -> bool:
    return head.has("arrival_s", "prompt_tokens", "output_tokens")


CASE = Format("case", "requests.csv of a recorded case (CSV)", _known, _rows)
