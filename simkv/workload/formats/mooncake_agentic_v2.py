"""Reader of version 2 of Dynamo's agentic Mooncake traces, which AISimulate replays (JSON lines).

The first line is a header with ``schema`` ("dynamo.agentic_mooncake"), ``version`` (2),
``block_size`` (tokens per hash id) and ``hash_id_scope`` ("local"). Each further line is a request
with ``request_id``, ``play_id``, ``session_id``, ``input_length``, ``output_length``, ``hash_ids``
and ``not_before_ms`` (github.com/ai-dynamo/aisimulate). Hash ids and sessions belong to a play. A
request with ``dependencies`` starts ``delay_ms`` after the completion or the dispatch (``trigger``)
of each of the requests that they name; ``relation`` does not change the time.

simkv knows waits for completions with one delay. Therefore, a wait for the dispatch of a request
becomes a wait for what this request waits for. A wait for the dispatch of a request that waits for
none becomes an arrival time. If the delays of a request differ, simkv uses the longest after the
last answer. A request that waits for answers starts then, even if this is before its
``not_before_ms``. Notes count the requests whose times may differ for these reasons.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from simkv.workload.column_values import describe_found
from simkv.workload.formats.mooncake_agentic import (
    AgenticRow,
    drop_duplicates,
    make_rows,
    sort_rows,
)
from simkv.workload.formats.trace_format import FileHead, TraceFormat
from simkv.workload.json_records import json_ids, json_integer, json_records, json_time
from simkv.workload.request_columns import RequestRows
from simkv.workload.trace_source import TraceSource

SCHEMA = "dynamo.agentic_mooncake"
VERSION = 2
_USED = {
    *("request_id", "play_id", "session_id", "input_length", "output_length", "hash_ids"),
    *("not_before_ms", "dependencies"),
}


@dataclass
class _Check:
    """Check of the lines of a file. ``block`` is the block size of the header, once it is read."""

    block: int = 0
    ignored: dict[str, None] = field(default_factory=dict)

    def __call__(self, record: dict[str, Any]) -> None:
        if "schema" in record:
            self._header(record)
            return
        if not self.block:
            raise ValueError("schema: should be in a header before the requests; found a request")
        for name in ("request_id", "play_id", "session_id"):
            if not isinstance(record.get(name), str) or not record[name]:
                raise ValueError(f"{name}: should be a name; {describe_found(record.get(name))}")
        json_time(record, "not_before_ms")
        prompt = json_integer(record, "input_length")
        json_integer(record, "output_length")
        count = len(json_ids(record, "hash_ids")) if record.get("hash_ids") is not None else 0
        if count > (most := -(-prompt // self.block)):
            raise ValueError(
                f"hash_ids: should be at most {most} ids, one per block of {self.block} tokens; "
                f"found {count}"
            )
        for index, one in enumerate(_dependencies(record)):
            _check_dependency(one, f"dependencies[{index}]")
        self.ignored.update(dict.fromkeys(name for name in record if name not in _USED))

    def _header(self, record: dict[str, Any]) -> None:
        for name, wanted in (("schema", SCHEMA), ("version", VERSION), ("hash_id_scope", "local")):
            if record.get(name) != wanted:
                raise ValueError(f"{name}: should be {wanted}; {describe_found(record.get(name))}")
        if not (block := json_integer(record, "block_size")):
            raise ValueError("block_size: should be at least 1; found 0")
        self.block = block


def _dependencies(record: dict[str, Any]) -> list[Any]:
    found = record.get("dependencies")
    if found is None:
        return []
    if not isinstance(found, list):
        raise ValueError(f"dependencies: should be a list; {describe_found(found)}")
    return found


def _check_dependency(one: Any, where: str) -> None:
    """Raise ValueError if a dependency is invalid. ``where`` is its path in the row."""
    if not isinstance(one, dict):
        raise ValueError(f"{where}: should be an object; {describe_found(one)}")
    if not isinstance(one.get("request_id"), str):
        found = describe_found(one.get("request_id"))
        raise ValueError(f"{where}.request_id: should be a request id; {found}")
    if one.get("trigger") not in ("dispatch", "completion"):
        found = describe_found(one.get("trigger"))
        raise ValueError(f"{where}.trigger: should be dispatch or completion; {found}")
    try:
        json_time(one, "delay_ms")
    except ValueError as error:
        raise ValueError(f"{where}.{error}") from None


def _rows(source: TraceSource) -> Iterator[RequestRows]:
    check = _Check()
    rows: list[AgenticRow] = []
    blocks: dict[tuple[str, int], int] = {}
    with source.text() as lines:
        for some in json_records(source, check, lines):
            for record, line, number in zip(
                some.records, some.lines, some.numbers.tolist(), strict=True
            ):
                if "schema" in record:
                    source.tally.rows -= 1
                else:
                    rows.append(AgenticRow(_plain(record, blocks), line, number))
    if check.ignored:
        source.tally.notes.append(f"ignored fields: {', '.join(sorted(check.ignored))}")
    ordered = sort_rows(source, drop_duplicates(source, rows), "dependencies")
    if resolved := _resolve(source, [row for row, _ in ordered]):
        yield make_rows(source, resolved, check.block)


def _plain(record: dict[str, Any], blocks: dict[tuple[str, int], int]) -> dict[str, Any]:
    """Return a row with the fields of version 1, which waits for all of its dependencies.

    ``blocks`` numbers the hash ids of all plays.
    """
    play = record["play_id"]
    dependencies = _dependencies(record)
    return {
        "request_id": record["request_id"],
        "session_id": f"{play}/{record['session_id']}",
        "input_length": record["input_length"],
        "output_length": record["output_length"],
        "hash_ids": [
            blocks.setdefault((play, name), len(blocks)) for name in record.get("hash_ids") or []
        ],
        "timestamp": record["not_before_ms"],
        "wait_for": [one["request_id"] for one in dependencies],
        "dependencies": dependencies,
    }


def _resolve(source: TraceSource, rows: list[AgenticRow]) -> list[tuple[AgenticRow, float]]:
    """Return the rows with waits for completions only, with their earliest arrival times (s).

    ``rows`` is in dependency order.
    """
    waits: dict[str, dict[str, float]] = {}
    arrivals: dict[str, float] = {}
    found: list[tuple[AgenticRow, float]] = []
    unequal = early = 0
    for row in rows:
        name, bound = row.record["request_id"], float(row.record["timestamp"])
        own = waits.setdefault(name, {})
        for one in row.record["dependencies"]:
            before, delay = one["request_id"], float(one["delay_ms"])
            started = one["trigger"] == "dispatch"
            awaited = waits[before] if started else {before: 0.0}
            if not awaited:
                bound = max(bound, arrivals[before] + delay)
            for other, more in awaited.items():
                own[other] = max(own.get(other, 0.0), more + delay)
        longest = max(own.values(), default=0.0)
        ready = max((arrivals[one] + longest for one in own), default=bound)
        unequal += len(set(own.values())) > 1
        early += ready < bound
        arrivals[name] = max(ready, bound)
        record = row.record | {"wait_for": list(own), "delay": longest}
        found.append((AgenticRow(record, row.line, row.number), arrivals[name] / 1e3))
    notes = source.tally.notes
    if unequal:
        notes.append(f"{unequal:,} requests wait with several delays; simkv uses the longest")
    if early:
        notes.append(
            f"{early:,} requests have a start time after their dependencies; simkv starts them "
            "after the awaited answers"
        )
    return sorted(found, key=lambda one: one[1])


def _known(head: FileHead) -> bool:
    names = ("schema", "version", "block_size", "request_id", "play_id", "not_before_ms")
    return head.kind == "json" and head.has(*names)


MOONCAKE_AGENTIC_V2 = TraceFormat(
    "mooncake-agentic-v2", "Dynamo's agentic Mooncake traces, version 2 (JSON lines)", _known, _rows
)
