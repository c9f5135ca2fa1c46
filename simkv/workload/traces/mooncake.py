"""Mooncake traces, and others in their form: JSON lines with the hash ids of prompt blocks.

``timestamp`` in ms, ``input_length``, ``output_length``, and ``hash_ids``, one for each block of
the prompt, the last block partial (github.com/kvcache-ai/Mooncake, FAST25-release/traces). Equal
ids mean equal tokens up to and including that block. Blocks have 512 tokens; where the first rows
say otherwise, as in Alibaba's traces of Qwen (16, and ``timestamp`` in s), what they say.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from simkv.workload.records import Records, column_of, json_ids, json_records, json_time, json_whole
from simkv.workload.rows import Pieces, Rows
from simkv.workload.source import Source, served
from simkv.workload.traces.base import Format, Head

#: Block sizes that are tried, the most usual first.
BLOCKS = (512, 16, 32, 64, 128, 256, 1024)


class _Checked:
    """What is right for a row, once the first rows have told the size of a block."""

    def __init__(self) -> None:
        self.possible = list(BLOCKS)

    @property
    def block(self) -> int:
        return self.possible[0]

    def __call__(self, record: dict[str, Any]) -> None:
        json_time(record, "timestamp")
        prompt = json_whole(record, "input_length")
        json_whole(record, "output_length")
        if "hash_ids" not in record:
            return
        count = len(json_ids(record, "hash_ids"))
        fitting = [block for block in self.possible if -(-prompt // block) == count]
        if not fitting:
            need = -(-prompt // self.block)
            raise ValueError(
                f"hash_ids: should be one id for each {self.block} tokens, the last partial; "
                f"found {count} ids for {prompt} tokens, which are {need} blocks"
            )
        self.possible = fitting


def _rows(source: Source) -> Iterator[Rows]:
    check = _Checked()
    with source.text() as lines:
        for some in json_records(source, check, lines):
            yield _of_records(source, some, check.block)


def _of_records(source: Source, some: Records, block: int) -> Rows:
    records = some.records
    per_second = 1.0 if any("chat_id" in record for record in records[:1]) else 1e3
    prompts = column_of((record["input_length"] for record in records), np.int64)
    hashes = [record.get("hash_ids") or [] for record in records]
    rows = Rows(
        arrival=column_of((record["timestamp"] for record in records), np.float64) / per_second,
        prompt_tokens=prompts,
        output_tokens=column_of((record["output_length"] for record in records), np.int64),
        number=some.numbers,
        pieces=Pieces.of_hashes(hashes, block, prompts) if any(hashes) else None,
    )
    return served(source, rows, some.lines)


def _known(head: Head) -> bool:
    return head.kind == "json" and head.has("timestamp", "input_length", "output_length")


MOONCAKE = Format(
    "mooncake", "Mooncake traces with hash_ids, and Qwen's (JSON lines)", _known, _rows
)
