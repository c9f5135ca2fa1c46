"""Decision traces on disk: gzip'd or plain JSON Lines, a header first, then one line per step."""

from __future__ import annotations

import gzip
import json
import zlib
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

from simkv.core.errors import InputError
from simkv.core.input_files import MAX_FILE_BYTES, read_bytes
from simkv.core.recording_format import RecordingLine

FORMAT = 1


class TraceError(Exception):
    """A trace file cannot be read; the message has the file, line and expected content."""


#: Kind of ending by a word in the ``why`` of the closing line, most specific first.
_ENDINGS = (
    ("panic", "panic"),
    ("livelock", "livelock"),
    ("same sequence twice", "self-deadlock"),
    ("raised", "raised"),
    ("left every queue", "lost"),
    ("hang", "stall"),
    ("no progress", "stall"),
    ("can ever be scheduled", "stall"),
    ("step cap", "stall"),
)


#: Ending of a recording that stopped at the recorder's own limit.
RECORDER_LIMIT = "limit"


def ending_kind(closing: RecordingLine) -> str:
    """Return the kind of impasse in a closing line: panic, livelock, lost, stall, ..."""
    why = str(closing.get("why", ""))
    return next((kind for word, kind in _ENDINGS if word in why), why)


def relative_times(line: RecordingLine) -> RecordingLine:
    """Return a line with times relative to its own, so that repetitions of a cycle are equal."""
    now = line.get("tick", 0)
    moments: RecordingLine = {"step": 0, "tick": 0}
    if "delivered" in line and isinstance(line["delivered"], list):
        moments["delivered"] = [[sent - now, *more] for sent, *more in line["delivered"]]
    if "events" in line:
        moments["events"] = [[_since(word, now) for word in event] for event in line["events"]]
    return {**line, **moments}


def _since(word: Any, now: int) -> Any:
    """Return ``msg57``, the message of tick 57, with its tick relative to ``now``."""
    sent = isinstance(word, str) and word.startswith("msg") and word[3:].isdecimal()
    return f"msg{int(word[3:]) - now}" if sent else word


@dataclass(frozen=True)
class DecisionTrace:
    """A recorded case: ``header`` (engine, variant, config, requests) and its step lines.

    ``truncated`` is the closing line of a case that the engine could not finish, or ``None``.
    """

    path: Path
    header: RecordingLine
    steps: list[RecordingLine]
    truncated: RecordingLine | None


def read_trace(path: Path) -> DecisionTrace:
    """Read a decision trace. Raises TraceError if the file is not one."""
    lines = _objects(path)
    if not lines:
        raise TraceError(f"{path}: empty; a header line was expected")
    header, steps = lines[0], lines[1:]
    if header.get("format") != FORMAT:
        raise TraceError(
            f"{path}:1: format: {header.get('format')!r} is not known; expected {FORMAT}"
        )
    for field, kind in (("engine", str), ("variant", str), ("config", dict), ("requests", list)):
        if not isinstance(header.get(field), kind):
            raise TraceError(f"{path}:1: {field}: a {kind.__name__} was expected in the header")
    for number, line in enumerate(steps, start=2):
        if not ({"step", "tick", "truncated"} & line.keys()):
            raise TraceError(f"{path}:{number}: neither a step, nor a tick, nor a closing line")
    truncated = steps.pop() if steps and steps[-1].get("truncated") else None
    return DecisionTrace(path, header, steps, truncated)


def _text(path: Path) -> str:
    """Return the text of a plain or gzip'd file."""
    try:
        raw = read_bytes(path)
        if raw[:2] == b"\x1f\x8b":
            with gzip.GzipFile(fileobj=BytesIO(raw)) as packed:
                raw = packed.read(MAX_FILE_BYTES + 1)
            if len(raw) > MAX_FILE_BYTES:
                raise TraceError(f"{path}: unpacks to more than {MAX_FILE_BYTES >> 20} MiB")
        return raw.decode()
    except InputError as error:
        raise TraceError(str(error)) from error
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise TraceError(f"{path}: damaged gzip data: {error}") from error
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise TraceError(f"{path}: not UTF-8 text: {error}") from error


def _objects(path: Path) -> list[RecordingLine]:
    """Return the lines of a file, each a JSON object."""
    lines: list[RecordingLine] = []
    for number, row in enumerate(_text(path).splitlines(), start=1):
        if not row.strip():
            continue
        try:
            value = json.loads(row)
        except (ValueError, RecursionError) as error:
            raise TraceError(f"{path}:{number}: not JSON: {error}") from error
        if not isinstance(value, dict):
            raise TraceError(f"{path}:{number}: a JSON object was expected, found {row[:40]!r}")
        lines.append(value)
    return lines
