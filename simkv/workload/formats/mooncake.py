"""Reader of Mooncake traces and other traces in this format: JSON lines with hash ids of prompt
blocks.

Each line has ``timestamp`` in ms, ``input_length``, ``output_length``, and ``hash_ids``, one per
block of the prompt; the last block may be partial (github.com/kvcache-ai/Mooncake,
FAST25-release/traces). If two blocks have the same id, their tokens and all tokens before them are
equal. Blocks have 512 tokens unless the first rows show another size, as in Alibaba's Qwen traces
(16 tokens, and ``timestamp`` in s).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from simkv.workload.formats.trace_format import FileHead, TraceFormat
from simkv.workload.json_records import (
    JsonRecords,
    json_ids,
    json_integer,
    json_records,
    json_time,
    make_column,
)
from simkv.workload.request_columns import PromptPieces, RequestRows
from simkv.workload.trace_source import TraceSource, select_served

#: Candidate block sizes, most common first.
BLOCK_SIZES = (512, 16, 32, 64, 128, 256, 1024)


class BlockCheck:
    """Check of the lengths and hash ids of rows."""

    # The block size is inferred from the first rows.

    def __init__(self) -> None:
        self.possible = list(BLOCK_SIZES)

    @property
    def block(self) -> int:
        return self.possible[0]

    def __call__(self, record: dict[str, Any]) -> None:
        prompt = json_integer(record, "input_length")
        json_integer(record, "output_length")
        if "hash_ids" not in record:
            return
        count = len(json_ids(record, "hash_ids"))
        fitting = [block for block in self.possible if -(-prompt // block) == count]
        if not fitting:
            need = -(-prompt // self.block)
            raise ValueError(
                f"hash_ids: should contain one id per block of {self.block} tokens; found "
                f"{count} ids for {prompt} tokens, expected {need}"
            )
        self.possible = fitting


def _rows(source: TraceSource) -> Iterator[RequestRows]:
    blocks = BlockCheck()

    def check(record: dict[str, Any]) -> None:
        json_time(record, "timestamp")
        blocks(record)

    with source.text() as lines:
        for some in json_records(source, check, lines):
            yield _of_records(source, some, blocks.block)


def _of_records(source: TraceSource, some: JsonRecords, block: int) -> RequestRows:
    records = some.records
    per_second = 1.0 if any("chat_id" in record for record in records[:1]) else 1e3
    prompts = make_column((record["input_length"] for record in records), np.int64)
    hashes = [record.get("hash_ids") or [] for record in records]
    rows = RequestRows(
        arrival=make_column((record["timestamp"] for record in records), np.float64) / per_second,
        prompt_tokens=prompts,
        output_tokens=make_column((record["output_length"] for record in records), np.int64),
        number=some.numbers,
        pieces=PromptPieces.from_hashes(hashes, block, prompts) if any(hashes) else None,
    )
    return select_served(source, rows, some.lines)


def _known(head: FileHead) -> bool:
    return head.kind == "json" and head.has("timestamp", "input_length", "output_length")


MOONCAKE = TraceFormat(
    "mooncake", "Mooncake traces with hash_ids, and Qwen's (JSON lines)", _known, _rows
)
