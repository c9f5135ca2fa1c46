"""Reader of Weka's traces of coding agents, which the benchmark AgentX and AISimulate replay.

A file has one JSON object per session: a single object, or one per line. A folder has such files.
``requests`` contains calls of a model (``type`` "n" or, if streaming, "s") and sub-agents (``type``
"subagent", which have their own ``requests``). A call has its start ``t`` (s after the start of the
session), ``in`` and ``out`` (tokens), ``hash_ids`` (one id per block of ``block_size`` tokens of
the prompt) and, optionally, ``api_time`` (s until its end; default 0). Ids belong to the session
unless ``hash_id_scope`` is "global" (github.com/callanjfox/kv-cache-tester,
docs/trace_replay_tester.md; github.com/ai-dynamo/aiperf, docs/tutorials/weka-trace.md).

The start of a sub-agent's call is relative to the start of the session or, in raw traces, to the
start of the sub-agent. As in AISimulate (docs/cli/user-guide.md), all of them are treated as
relative to the start of the sub-agent if any of them would otherwise be before this start.

The module ``recorded_dependencies`` infers for which other calls a call waits. A trace can contain
the calls of a sub-agent as calls of the main agent; unlike aiperf, this reader does not detect them
by their ``hash_ids``, but overlapping calls run in parallel in any case. The delay before a call is
tool time if its ``input_types`` contains "tool_result" or, without ``input_types``, if the ``stop``
of an awaited call is "tool_use"; otherwise it is think time. All sessions start at 0;
``max_sessions`` in the workload limits the number of sessions in progress.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from simkv.core.input_files import open_bytes
from simkv.workload.column_values import describe_found
from simkv.workload.formats.recorded_dependencies import (
    EPSILON_S,
    RecordedCall,
    infer_waits,
    rows_from_calls,
)
from simkv.workload.formats.trace_format import FileHead, TraceFormat
from simkv.workload.json_records import (
    json_documents,
    json_ids,
    json_integer,
    json_time,
    make_column,
)
from simkv.workload.request_columns import PromptPieces, RequestRows
from simkv.workload.trace_source import TraceSource, decompress

#: File names in a folder of traces.
_SUFFIXES = (".json", ".jsonl", ".json.gz", ".jsonl.gz")
#: Bytes of a file that are read to detect the format of a folder.
_HEAD_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class _Call:
    """A model call.

    - ``spawned``: start of its sub-agent in seconds; None for the main agent.
    - ``after_tool``: whether a tool result precedes the call; None if unknown.
    - ``stop``: stop reason.
    """

    call: RecordedCall
    spawned: float | None
    hashes: list[int]
    after_tool: bool | None
    stop: str


@dataclass(frozen=True, slots=True)
class _Session:
    """A session: its block size, whether its hash ids are global, and its calls.

    ``parents`` maps sub-agents to the main agent.
    """

    block: int
    is_global: bool
    calls: list[_Call]
    parents: dict[str, str]


def _session(record: Any, line: int) -> _Session:
    """Return the session of a JSON object. Raises ValueError if a field is invalid."""
    if not isinstance(record, dict):
        raise ValueError(f"row: should be a JSON object; {describe_found(record)}")
    name = _text(record, "id")
    if (block := json_integer(record, "block_size")) < 1:
        raise ValueError(f"block_size: should be at least 1; {describe_found(block)}")
    scope = record.get("hash_id_scope", "local")
    if scope not in ("local", "global"):
        raise ValueError(f"hash_id_scope: should be local or global; {describe_found(scope)}")
    session = _Session(block, scope == "global", [], {})
    for field, entry in _entries(record, "requests"):
        if _kind(entry, field, "subagent") != "subagent":
            session.calls.append(_call(entry, field, name, line, block, None))
            continue
        spawned = _checked(json_time, entry, field, "t")
        agent = f"{name}::sa:{_text(entry, 'agent_id', field)}"
        session.parents[agent] = name
        for inner, call in _entries(entry, f"{field}.requests"):
            _kind(call, inner)
            session.calls.append(_call(call, inner, agent, line, block, spawned))
    return session


def _text(record: dict[str, Any], name: str, field: str = "") -> str:
    value = record.get(name)
    if isinstance(value, str) and value:
        return value
    raise ValueError(f"{_path(field, name)}: should be a name; {describe_found(value)}")


def _path(field: str, name: str) -> str:
    return f"{field}.{name}" if field else name


def _entries(record: dict[str, Any], field: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the objects of a list, each with its path in the record."""
    found = record.get("requests")
    if not isinstance(found, list):
        raise ValueError(f"{field}: should be a list; {describe_found(found)}")
    for index, entry in enumerate(found):
        if not isinstance(entry, dict):
            raise ValueError(f"{field}[{index}]: should be an object; {describe_found(entry)}")
        yield f"{field}[{index}]", entry


def _kind(entry: dict[str, Any], field: str, *more: str) -> str:
    """Return the type of an entry: n, s or one of ``more``."""
    kind = entry.get("type")
    if kind in ("n", "s", *more):
        return str(kind)
    wanted = " or ".join(", ".join(("n", "s", *more)).rsplit(", ", 1))
    raise ValueError(f"{field}.type: should be {wanted}; {describe_found(kind)}")


def _checked(read: Any, entry: dict[str, Any], field: str, name: str) -> Any:
    """Return a field of an entry, read by ``read``. Error messages give the path of the field."""
    try:
        return read(entry, name)
    except ValueError as error:
        raise ValueError(f"{field}.{error}") from None


def _call(
    entry: dict[str, Any], field: str, agent: str, line: int, block: int, spawned: float | None
) -> _Call:
    start = _checked(json_time, entry, field, "t")
    took = 0.0
    if entry.get("api_time") is not None:
        took = _checked(json_time, entry, field, "api_time")
    prompt, output = (_checked(json_integer, entry, field, name) for name in ("in", "out"))
    hashes = _checked(json_ids, entry, field, "hash_ids") if "hash_ids" in entry else []
    if len(hashes) > (most := -(-prompt // block)):
        raise ValueError(
            f"{field}.hash_ids: should be at most {most} ids, one per block of {block} tokens; "
            f"found {len(hashes)}"
        )
    types = entry.get("input_types")
    after_tool = "tool_result" in types if isinstance(types, list) and types else None
    call = RecordedCall(agent, start, start + took, prompt, output, -1, line)
    return _Call(call, spawned, hashes, after_tool, str(entry.get("stop") or ""))


def _is_relative(sessions: list[_Session]) -> bool:
    """Return whether the times of sub-agents' calls are relative to the start of the sub-agent."""
    # This holds if any of the times is before the start of the sub-agent.
    calls = (one for session in sessions for one in session.calls if one.spawned is not None)
    return any(one.call.start < one.spawned - EPSILON_S for one in calls if one.spawned)


def _rows(source: TraceSource) -> Iterator[RequestRows]:
    sessions: list[_Session] = []
    names: set[str] = set()
    for path in _files(source.path):
        for line, document in json_documents(source, path):
            try:
                session = _session(document, line)
                if document["id"] in names:
                    raise ValueError(f"id: should be unique; found {document['id']!r} again")
            except ValueError as error:
                column, _, what = str(error).partition(": ")
                source.bad(line, column, what, path)
                continue
            names.add(document["id"])
            sessions.append(session)
    relative = _is_relative(sessions)
    blocks: dict[tuple[int, int], int] = {}
    for index, session in enumerate(sessions):
        calls = [_at_session_time(one) for one in session.calls] if relative else session.calls
        scope = -1 if session.is_global else index
        yield _of_session(source, replace(session, calls=calls), scope, blocks)


def _at_session_time(one: _Call) -> _Call:
    """Return a call of a sub-agent with its times relative to the start of the session."""
    if one.spawned is None:
        return one
    call, spawned = one.call, one.spawned
    call = replace(call, start=call.start + spawned, end=call.end + spawned)
    return replace(one, call=call)


def _of_session(
    source: TraceSource, session: _Session, scope: int, blocks: dict[tuple[int, int], int]
) -> RequestRows:
    """Return the calls of a session as rows. ``blocks`` numbers the hash ids by scope."""
    first = source.tally.rows
    source.tally.rows += len(session.calls)
    silent = make_column((one.call.output_tokens == 0 for one in session.calls), bool)
    source.failed("with no output token", silent, [one.call.line for one in session.calls])
    served = [one for one in session.calls if one.call.output_tokens]
    served.sort(key=lambda one: one.call.start)
    calls = [replace(one.call, number=first + row) for row, one in enumerate(served)]
    waits = infer_waits(calls, session.parents)
    for row, (one, wait) in enumerate(zip(served, waits, strict=True)):
        stopped = any(served[other].stop == "tool_use" for other in wait.before)
        if stopped if one.after_tool is None else one.after_tool:
            calls[row] = replace(calls[row], tool_time=wait.delay)
    hashes = [
        [blocks.setdefault((scope, name), len(blocks)) for name in one.hashes] for one in served
    ]
    prompts = make_column((call.prompt_tokens for call in calls), np.int64)
    pieces = PromptPieces.from_hashes(hashes, session.block, prompts)
    return rows_from_calls(source, calls, waits, pieces if any(hashes) else None)


def _files(path: Path) -> list[Path]:
    """Return the trace files of a folder and its subfolders, in order of their names."""
    if not path.is_dir():
        return [path]
    return sorted(one for one in path.rglob("*") if one.name.endswith(_SUFFIXES))


def _known(head: FileHead) -> bool:
    if head.kind == "folder":
        first = next(iter(_files(head.path)), None)
        if first is None:
            return False
        with open_bytes(first) as stream:
            start = decompress(stream).read(_HEAD_BYTES)
        return all(f'"{name}"'.encode() in start for name in ("requests", "block_size"))
    return head.kind == "json" and head.has("requests", "block_size", "hash_ids", "in", "out")


WEKA = TraceFormat(
    "weka", "Weka's traces of coding agents, as in AgentX (JSON, JSON lines, folder)", _known, _rows
)
