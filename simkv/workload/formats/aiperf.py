"""Reader of NVIDIA aiperf's per-request export ``profile_export.jsonl`` (JSON lines).

``metadata`` has ``request_start_ns`` (Unix time; the first request is time 0), ``benchmark_phase``
and ``was_cancelled``. ``metrics`` has values with their units: ``input_sequence_length`` and
``output_sequence_length`` in tokens, ``time_to_first_token``, ``inter_token_latency`` and
``request_latency``. Warm-up requests, cancelled requests and requests with an ``error`` are left
out and counted (github.com/ai-dynamo/aiperf, docs/tutorials/working-with-profile-exports.md).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from simkv.workload.column_values import describe_found
from simkv.workload.formats.recorded_dependencies import (
    RecordedCall,
    grow_prompts,
    infer_waits,
    rows_from_calls,
)
from simkv.workload.formats.trace_format import FileHead, MeasuredLatencies, TraceFormat
from simkv.workload.json_records import (
    json_integer,
    json_records,
    json_time,
    make_column,
)
from simkv.workload.request_columns import RequestRows
from simkv.workload.trace_source import TraceSource

_MS = {"ns": 1e-6, "us": 1e-3, "ms": 1.0, "s": 1e3, "sec": 1e3}


def _outcome(record: dict[str, Any]) -> str | None:
    """Return the reason why a request is left out, or None."""
    metadata = record["metadata"]
    if metadata.get("benchmark_phase", "profiling") != "profiling":
        return "from the warm-up"
    if metadata.get("was_cancelled"):
        return "cancelled"
    return "with an error" if record.get("error") else None


def _check(record: dict[str, Any]) -> None:
    for name in ("metadata", "metrics"):
        if not isinstance(record.get(name), dict):
            raise ValueError(f"{name}: should be an object; {describe_found(record.get(name))}")
    metadata = record["metadata"]
    json_time(metadata, "request_start_ns")
    if metadata.get("request_end_ns") is not None:
        json_time(metadata, "request_end_ns")
    if metadata.get("turn_index") is not None:
        json_integer(metadata, "turn_index")
    if _outcome(record) is None:
        for name in ("input_sequence_length", "output_sequence_length"):
            _tokens(record, name)


def _tokens(record: dict[str, Any], name: str) -> int:
    metric = record["metrics"].get(name)
    return json_integer({name: metric.get("value")} if isinstance(metric, dict) else {}, name)


class _Turn(NamedTuple):
    """A served request and its session, if it has one.

    Times are in ns since 1970; the end is 0 if it is missing.
    """

    session: str | None
    parent: str | None
    turn: int
    start: int
    end: int
    prompt: int
    output: int
    number: int
    line: int


def _rows(source: TraceSource) -> Iterator[RequestRows]:
    turns = list(_turns(source))
    sizes = Counter(turn.session for turn in turns if turn.session is not None)
    if any(size > 1 for size in sizes.values()):
        turns.sort(key=lambda turn: turn.start)
        yield _sessions(source, list(_in_order(source, turns, sizes)))
    elif turns:
        starts = make_column((turn.start for turn in turns), np.int64)
        yield RequestRows(
            arrival=source.since_first(starts) / 1e9,
            prompt_tokens=make_column((turn.prompt for turn in turns), np.int64),
            output_tokens=make_column((turn.output for turn in turns), np.int64),
            number=make_column((turn.number for turn in turns), np.int64),
        )


def _turns(source: TraceSource) -> Iterator[_Turn]:
    """Yield the served requests. Count the other requests by reason."""
    with source.text() as lines:
        for some in json_records(source, _check, lines):
            reasons = [_outcome(record) for record in some.records]
            for reason in sorted({r for r in reasons if r}):
                source.failed(reason, make_column((r == reason for r in reasons), bool), some.lines)
            turns = [
                _turn(some.records[index], int(some.numbers[index]), some.lines[index])
                for index, reason in enumerate(reasons)
                if reason is None
            ]
            for reason, name in (
                ("with no output token", "output"),
                ("with no prompt token", "prompt"),
            ):
                empty = make_column((getattr(turn, name) == 0 for turn in turns), bool)
                source.failed(reason, empty, [turn.line for turn in turns])
                turns = [turn for turn, none in zip(turns, empty, strict=True) if not none]
            yield from turns


def _turn(record: dict[str, Any], number: int, line: int) -> _Turn:
    metadata = record["metadata"]
    session = metadata.get("x_correlation_id")
    if session is None and metadata.get("turn_index") is not None:
        session = metadata.get("session_num")
    parent = metadata.get("parent_correlation_id")
    return _Turn(
        None if session is None else str(session),
        None if parent is None else str(parent),
        metadata.get("turn_index") or 0,
        metadata["request_start_ns"],
        metadata.get("request_end_ns") or 0,
        _tokens(record, "input_sequence_length"),
        _tokens(record, "output_sequence_length"),
        number,
        line,
    )


def _in_order(
    source: TraceSource, turns: Sequence[_Turn], sizes: Mapping[str, int]
) -> Iterator[_Turn]:
    """Yield the turns. Report turns that do not continue their session."""
    # The turns are given in order of their start times.
    last: dict[str, _Turn] = {}
    for turn in turns:
        before = None if turn.session is None else last.get(turn.session)
        if turn.end < turn.start and turn.session is not None and sizes[turn.session] > 1:
            what = f"should be at least request_start_ns in a session; found {turn.end}"
            source.bad(turn.line, "request_end_ns", what)
            continue
        if before is not None and turn.turn <= before.turn:
            what = f"should be above turn {before.turn} of line {before.line}; found {turn.turn}"
            source.bad(turn.line, "turn_index", what)
            continue
        if turn.session is not None:
            last[turn.session] = turn
        yield turn


def _sessions(source: TraceSource, turns: Sequence[_Turn]) -> RequestRows:
    """Return the turns as rows, with the turns that each of them waits for."""
    # ``turns`` is in order of start times.
    first = turns[0].start if turns else 0
    calls = [
        RecordedCall(
            turn.session or f"request {turn.number}",
            (turn.start - first) / 1e9,
            (max(turn.end, turn.start) - first) / 1e9,
            turn.prompt,
            turn.output,
            turn.number,
            turn.line,
        )
        for turn in turns
    ]
    parents = {turn.session: turn.parent for turn in turns if turn.session and turn.parent}
    waits = infer_waits(calls, parents)
    return rows_from_calls(source, calls, waits, grow_prompts(calls))


def _measured(record: dict[str, Any]) -> MeasuredLatencies:
    def ms(name: str) -> float:
        metric = record["metrics"].get(name)
        if not isinstance(metric, dict) or metric.get("unit") not in _MS:
            return float("nan")
        return float(json_time({name: metric.get("value")}, name) * _MS[metric["unit"]])

    return MeasuredLatencies(
        ms("time_to_first_token"), ms("inter_token_latency"), ms("request_latency"), None
    )


def _known(head: FileHead) -> bool:
    return head.kind == "json" and head.has("metadata", "metrics", "request_start_ns")


AIPERF = TraceFormat(
    "aiperf",
    "requests of NVIDIA's aiperf, profile_export.jsonl (JSON lines)",
    _known,
    _rows,
    _measured,
)
