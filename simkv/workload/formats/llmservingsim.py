"""Reader of LLMServingSim's workloads and its captures of real vLLM runs (JSON lines).

A line of a workload is a request (``input_toks, output_toks, arrival_time_ns``, optional
``input_tok_ids``) or a session (``session_id, arrival_time_ns, sub_requests``). Each request of a
session starts ``tool_duration_ns`` after the previous one ends. A capture line has ``arrival_time``
in s on a wall clock; the first row is time 0. If a prompt has token ids, it is identified by its
blocks of 16 tokens; the hash of a block covers all tokens up to its end
(github.com/casys-kaist/LLMServingSim, workloads/README.md, bench/README.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from simkv.workload.column_values import describe_found
from simkv.workload.formats.trace_format import FileHead, MeasuredLatencies, TraceFormat
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

#: vLLM's default block size.
BLOCK_TOKENS = 16


class _Chain:
    """Ids of token blocks. Two blocks have the same id if their tokens and all earlier tokens are
    equal.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[int, ...], int] = {}

    def names(self, tokens: list[int]) -> list[int]:
        names: list[int] = []
        for start in range(0, len(tokens), BLOCK_TOKENS):
            before = names[-1] if names else -1
            name = (before, *tokens[start : start + BLOCK_TOKENS])
            names.append(self._known.setdefault(name, len(self._known)))
        return names


def _check(record: dict[str, Any]) -> None:
    json_time(record, "arrival_time_ns")
    if "sub_requests" not in record:
        _check_call(record)
        return
    calls = record["sub_requests"]
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise ValueError(f"sub_requests: should be a list of objects; {describe_found(calls)}")
    for call in calls:
        _check_call(call)
        if "tool_duration_ns" in call:
            json_time(call, "tool_duration_ns")


def _check_call(call: dict[str, Any]) -> None:
    tokens = json_integer(call, "input_toks")
    json_integer(call, "output_toks")
    if call.get("input_tok_ids") and len(json_ids(call, "input_tok_ids")) != tokens:
        count = len(call["input_tok_ids"])
        raise ValueError(
            f"input_tok_ids: should contain {tokens} ids, as stated in input_toks; found {count}"
        )


def _rows(source: TraceSource) -> Iterator[RequestRows]:
    chain, noted = _Chain(), False
    with source.text() as lines:
        for some in json_records(source, _check, lines):
            rows = _of_records(source, some, chain)
            if rows.think_time is not None and not noted:
                noted = True
                source.tally.notes.append(
                    "a call of a session arrives tool_duration_ns after the end of the previous "
                    "call; the arrival stored here is a lower bound"
                )
            yield rows


def _of_records(source: TraceSource, some: JsonRecords, chain: _Chain) -> RequestRows:
    calls: list[tuple[float, int, float, int, dict[str, Any]]] = []
    for line, record in zip(some.lines, some.records, strict=True):
        time, think, session = record["arrival_time_ns"] / 1e9, np.nan, -1
        if "sub_requests" in record:
            session = source.sessions.number(str(record.get("session_id", f"line {line}")))
        for call in record.get("sub_requests", [record]):
            calls.append((time, session, think, line, call))
            think = call.get("tool_duration_ns", 0) / 1e9
            time += think
    requests = [call for *_, call in calls]
    prompts = make_column((call["input_toks"] for call in requests), np.int64)
    names = [chain.names(call.get("input_tok_ids") or []) for call in requests]
    thinks = make_column((think for _, _, think, _, _ in calls), np.float64)
    in_sessions = any(session >= 0 for _, session, *_ in calls)
    rows = RequestRows(
        arrival=make_column((time for time, *_ in calls), np.float64),
        prompt_tokens=prompts,
        output_tokens=make_column((call["output_toks"] for call in requests), np.int64),
        session=make_column((call[1] for call in calls), np.int64) if in_sessions else None,
        think_time=thinks if in_sessions else None,
        pieces=PromptPieces.from_hashes(names, BLOCK_TOKENS, prompts) if any(names) else None,
    )
    return select_served(source, rows, [line for *_, line, _ in calls])


def _known(head: FileHead) -> bool:
    calls = head.has("input_toks", "output_toks") and head.has("arrival_time_ns")
    return head.kind == "json" and (calls or head.has("sub_requests"))


def _check_capture(record: dict[str, Any]) -> None:
    json_integer(record, "input_toks")
    json_integer(record, "output_toks")
    json_time(record, "arrival_time")


def _capture_rows(source: TraceSource) -> Iterator[RequestRows]:
    with source.text() as lines:
        for some in json_records(source, _check_capture, lines):
            records = some.records
            times = make_column((record["arrival_time"] for record in records), np.float64)
            rows = RequestRows(
                arrival=source.since_first(times),
                prompt_tokens=make_column((record["input_toks"] for record in records), np.int64),
                output_tokens=make_column((record["output_toks"] for record in records), np.int64),
                number=some.numbers,
            )
            yield select_served(source, rows, some.lines)


def _capture_measured(record: dict[str, Any]) -> MeasuredLatencies:
    names = ("queued_ts", "scheduled_ts", "first_token_ts", "last_token_ts")
    queued, scheduled, first, last = (json_time(record, name) for name in names)
    if not queued <= scheduled <= first <= last:
        raise ValueError(
            f"{', '.join(names)}: should not decrease; {describe_found(record['last_token_ts'])}"
        )
    steps = max(int(record["output_toks"]) - 1, 1)
    return MeasuredLatencies(
        1e3 * (first - queued),
        1e3 * (last - first) / steps,
        1e3 * (last - queued),
        1e3 * (scheduled - queued),
    )


def _capture_known(head: FileHead) -> bool:
    return head.kind == "json" and head.has("input_toks", "output_toks", "arrival_time")


LLMSERVINGSIM = TraceFormat(
    "llmservingsim", "LLMServingSim workloads, requests and sessions (JSON lines)", _known, _rows
)
CAPTURE = TraceFormat(
    "llmservingsim-bench",
    "LLMServingSim's captures of vLLM, requests.jsonl (JSON lines)",
    _capture_known,
    _capture_rows,
    _capture_measured,
)
