"""Reader of agentic Mooncake traces, whose rows wait for other rows (JSON lines).

The format is the output of Dynamo's converter of agent traces (docs.rs/dynamo-data-gen,
``AgenticMooncakeRow``). Each line has ``request_id``, ``input_length``, ``output_length`` and, for
the blocks of the prompt, ``hash_ids``. ``wait_for`` names the requests whose answers must be
complete; the request arrives ``delay`` plus ``tool_wait_ms`` later (both ms). A row without
``wait_for`` arrives at its ``timestamp`` (ms). ``session_id`` names the trajectory of an agent or
sub-agent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from graphlib import CycleError, TopologicalSorter
from typing import Any, NamedTuple

import numpy as np

from simkv.workload.column_values import describe_found
from simkv.workload.formats.mooncake import BlockCheck
from simkv.workload.formats.trace_format import FileHead, TraceFormat
from simkv.workload.json_records import json_records, json_time, make_column
from simkv.workload.request_columns import PromptPieces, RequestRows, make_tuples
from simkv.workload.trace_source import TraceSource, select_served


class AgenticRow(NamedTuple):
    """A row with its line and its number in the file."""

    record: dict[str, Any]
    line: int
    number: int

    @property
    def wait_for(self) -> list[str]:
        return self.record.get("wait_for") or []

    def seconds(self, name: str) -> float:
        return float(self.record.get(name) or 0.0) / 1e3


def _check(record: dict[str, Any]) -> None:
    name = record.get("request_id")
    if not isinstance(name, str) or not name:
        raise ValueError(f"request_id: should be a name; {describe_found(name)}")
    before = record.get("wait_for") or []
    if not isinstance(before, list) or not all(isinstance(one, str) for one in before):
        raise ValueError(f"wait_for: should be a list of request ids; {describe_found(before)}")
    for time in ("timestamp", "delay", "tool_wait_ms"):
        if record.get(time) is not None or (time == "timestamp" and not before):
            json_time(record, time)


def _rows(source: TraceSource) -> Iterator[RequestRows]:
    blocks = BlockCheck()

    def check(record: dict[str, Any]) -> None:
        _check(record)
        blocks(record)

    rows: list[AgenticRow] = []
    with source.text() as lines:
        for some in json_records(source, check, lines):
            columns = zip(some.records, some.lines, some.numbers.tolist(), strict=True)
            rows += (AgenticRow(*row) for row in columns)
    if ordered := sort_rows(source, drop_duplicates(source, rows)):
        yield make_rows(source, ordered, blocks.block)


def drop_duplicates(source: TraceSource, rows: Sequence[AgenticRow]) -> dict[str, AgenticRow]:
    """Return the rows by request id. Report a second row with the same id."""
    found: dict[str, AgenticRow] = {}
    for row in rows:
        name = row.record["request_id"]
        if found.setdefault(name, row) is not row:
            first = found[name].line
            source.bad(row.line, "request_id", f"should be unique; found {name!r} of line {first}")
    return found


def sort_rows(
    source: TraceSource, rows: dict[str, AgenticRow], column: str = "wait_for"
) -> list[tuple[AgenticRow, float]]:
    """Return the rows in dependency order, with their earliest arrival times (s).

    ``column`` is the field that error messages name.
    """
    # Rows that wait for each other, or for requests that are not in the trace, are reported as
    # invalid.
    arrivals: dict[str, float] = {}
    sorter = TopologicalSorter({name: row.wait_for for name, row in rows.items()})
    with suppress(CycleError):  # rows outside the cycles are sorted nevertheless
        sorter.prepare()
    while ready := sorter.get_ready():
        for name in filter(rows.__contains__, ready):
            row = rows[name]
            if unknown := [one for one in row.wait_for if one not in rows]:
                what = f"should be request ids of this trace; found {unknown[0]!r}"
                source.bad(row.line, column, what)
                del rows[name]
                continue
            delay = row.seconds("delay") + row.seconds("tool_wait_ms")
            awaited = (arrivals[one] + delay for one in row.wait_for)
            arrivals[name] = max(row.seconds("timestamp"), *awaited, 0.0)
        sorter.done(*ready)
    for name in [name for name in rows if name not in arrivals]:
        row = rows[name]
        what = f"should not lead back to the request; found a cycle with {row.wait_for[0]!r}"
        source.bad(row.line, column, what)
        del rows[name]
    ordered = [(rows[name], arrival) for name, arrival in arrivals.items() if name in rows]
    return sorted(ordered, key=lambda one: one[1])


def make_rows(
    source: TraceSource, ordered: list[tuple[AgenticRow, float]], block: int
) -> RequestRows:
    """Return sorted rows as columns. ``block`` is the number of tokens per hash id."""
    rows = [row for row, _ in ordered]
    records = [row.record for row in rows]
    numbers = {row.record["request_id"]: row.number for row in rows}
    prompts = make_column((record["input_length"] for record in records), np.int64)
    hashes = [record.get("hash_ids") or [] for record in records]
    sessions = [record.get("session_id") for record in records]
    found = RequestRows(
        arrival=make_column((arrival for _, arrival in ordered), np.float64),
        prompt_tokens=prompts,
        output_tokens=make_column((record["output_length"] for record in records), np.int64),
        session=make_column(
            (-1 if one is None else source.sessions.number(str(one)) for one in sessions), np.int64
        ),
        think_time=_delays(rows, "delay"),
        tool_time=_delays(rows, "tool_wait_ms"),
        waits_for=make_tuples([tuple(numbers[one] for one in row.wait_for) for row in rows]),
        number=make_column((row.number for row in rows), np.int64),
        pieces=PromptPieces.from_hashes(hashes, block, prompts) if any(hashes) else None,
    )
    return select_served(source, found, [row.line for row in rows])


def _delays(rows: Sequence[AgenticRow], name: str) -> Any:
    """Return the delay ``name`` of each row in seconds; NaN if the row waits for no other row."""
    return make_column((row.seconds(name) if row.wait_for else np.nan for row in rows), np.float64)


def _known(head: FileHead) -> bool:
    lengths = head.has("request_id", "input_length", "output_length")
    return head.kind == "json" and lengths and (head.has("wait_for") or head.has("tool_wait_ms"))


MOONCAKE_AGENTIC = TraceFormat(
    "mooncake-agentic", "Dynamo's agentic Mooncake traces with wait_for (JSON lines)", _known, _rows
)
