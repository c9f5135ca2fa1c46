"""Decision traces on disk: JSON Lines, plain or gzip-compressed.

A recording is a header line followed by one line per step. A file contains one recording or
several; each header line (an object with ``format``) starts the next one.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

from simkv.core.errors import InputError
from simkv.core.input_files import MAX_FILE_BYTES, read_bytes
from simkv.core.recording_format import RecordingLine

FORMAT = 1


class TraceError(Exception):
    """Raised if a trace file cannot be read.

    The message names the file, the line and the expected content.
    """


#: Names of JSON types for use in messages.
_KINDS = {str: "a string", dict: "an object", list: "an array"}

#: Kinds of endings, by a word in the field ``why`` of the closing line; the most specific words
#: come first.
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


#: Ending of a recording that stopped at the recorder's step limit.
RECORDER_LIMIT = "limit"


def ending_kind(closing: RecordingLine) -> str:
    """Return the kind of ending that a closing line states, such as panic, livelock, lost or stall.

    If the reason is of no known kind, it is returned unchanged.
    """
    why = str(closing.get("why", ""))
    return next((kind for word, kind in _ENDINGS if word in why), why)


def relative_times(line: RecordingLine) -> RecordingLine:
    """Return a line in which all step numbers and ticks are relative to the line itself."""
    now = line.get("tick", 0)
    moments: RecordingLine = {"step": 0, "tick": 0}
    if "delivered" in line and isinstance(line["delivered"], list):
        moments["delivered"] = [[sent - now, *more] for sent, *more in line["delivered"]]
    if "events" in line:
        moments["events"] = [[_since(word, now) for word in event] for event in line["events"]]
    return {**line, **moments}


def _since(word: Any, now: int) -> Any:
    """Return the name of a message with its tick relative to ``now``: ``msg57`` at tick 50 becomes
    ``msg7``.
    """
    sent = isinstance(word, str) and word.startswith("msg") and word[3:].isdecimal()
    return f"msg{int(word[3:]) - now}" if sent else word


@dataclass(frozen=True)
class DecisionTrace:
    """A parsed recording: the header (engine, variant, config and requests) and one line per step.

    ``truncated`` is the closing line if the engine could not finish all requests, or None. ``name``
    and ``where`` are the recording's name and position in error messages.
    """

    name: str
    header: RecordingLine
    steps: list[RecordingLine]
    truncated: RecordingLine | None
    where: str = "header"


@dataclass(frozen=True)
class Recording:
    """An unparsed recording: its lines and the line number of its header in the file.

    ``case`` is the name of the recorded case, or its number. ``packed`` is true if the file
    contains several recordings.
    """

    path: Path
    first: int
    rows: Sequence[str] = field(repr=False)
    case: str
    packed: bool

    def parse(self) -> DecisionTrace:
        """Return the parsed recording. Raises TraceError for invalid lines."""
        lines = {
            number: self._object(number, row)
            for number, row in enumerate(self.rows, start=self.first)
            if row.strip()
        }
        header, *steps = lines.values()
        if header.get("format") != FORMAT:
            why = f"format: must be {FORMAT}, got {header.get('format')!r}"
            raise self._error(self.first, why)
        for name, kind in (("engine", str), ("variant", str), ("config", dict), ("requests", list)):
            if not isinstance(header.get(name), kind):
                why = f"header: {name}: expected {_KINDS[kind]}"
                raise self._error(self.first, why)
        for number, line in list(lines.items())[1:]:
            if not ({"step", "tick", "truncated"} & line.keys()):
                raise self._error(
                    number, "unknown kind of line; expected a step, a tick or a closing line"
                )
        truncated = steps.pop() if steps and steps[-1].get("truncated") else None
        name = f"{self.path}: {self.case}" if self.packed else f"{self.path}"
        return DecisionTrace(name, header, steps, truncated, self._where(self.first))

    def _object(self, number: int, row: str) -> RecordingLine:
        try:
            value = json.loads(row)
        except (ValueError, RecursionError) as error:
            raise self._error(number, f"not JSON: {error}") from error
        if not isinstance(value, dict):
            raise self._error(number, f"expected a JSON object, found {row[:40]!r}")
        return value

    def _where(self, number: int) -> str:
        return f"{self.path}:{number}" + (f": {self.case}" if self.packed else "")

    def _error(self, number: int, why: str) -> TraceError:
        return TraceError(f"{self._where(number)}: {why}")


def recording_files(path: Path) -> list[Path]:
    """Return the files with recordings: ``path`` itself, or the files under it if it is a
    directory.

    Raises TraceError if the directory contains no recordings.
    """
    if not path.is_dir():
        return [path]
    found = sorted(file for file in path.rglob("*") if file.name.endswith((".jsonl", ".jsonl.gz")))
    if not found:
        raise TraceError(f"{path}: no recordings (*.jsonl, *.jsonl.gz) in this directory")
    return found


def split_recordings(path: Path) -> list[Recording]:
    """Return the recordings of a file. Raises TraceError if the file cannot be read or is empty."""
    rows = _text(path).splitlines()
    while rows and not rows[-1].strip():
        rows.pop()
    if not rows:
        raise TraceError(f"{path}: the file is empty; expected a header line")
    first = next(at for at, row in enumerate(rows) if row.strip())
    cases = {first: _case(rows[first])}
    for at in range(first + 1, len(rows)):
        if '"format"' in rows[at] and (case := _case(rows[at])) is not None:
            cases[at] = case
    ends = [*list(cases)[1:], len(rows)]
    return [
        Recording(path, at + 1, rows[at:end], case or f"recording {number}", len(cases) > 1)
        for number, ((at, case), end) in enumerate(zip(cases.items(), ends, strict=True), start=1)
    ]


def _case(row: str) -> str | None:
    """Return the case name in a header line; "" if the header has no name, None if the line is not
    a header.
    """
    try:
        header = json.loads(row)
    except (ValueError, RecursionError):
        return None
    if not isinstance(header, dict) or "format" not in header:
        return None
    return str(header.get("case", ""))


def read_traces(path: Path) -> Iterator[DecisionTrace]:
    """Yield the parsed recordings of a file or directory. Raises TraceError for unreadable
    files.
    """
    for file in recording_files(path):
        for recording in split_recordings(file):
            yield recording.parse()


def read_trace(path: Path) -> DecisionTrace:
    """Return the only recording of a file.

    Raises TraceError if the file contains several recordings or cannot be read.
    """
    recording, *more = split_recordings(path)
    if more:
        raise TraceError(
            f"{path}: contains {len(more) + 1} recordings; expected a file with one recording"
        )
    return recording.parse()


def pack_traces(traces: Iterable[DecisionTrace]) -> bytes:
    """Return the content of a gzip-compressed file with the recordings, for ``read_traces``."""
    lines = (
        line
        for trace in traces
        for line in (trace.header, *trace.steps, *([trace.truncated] if trace.truncated else []))
    )
    text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
    return gzip.compress(text.encode(), mtime=0)


def _text(path: Path) -> str:
    try:
        raw = read_bytes(path)
        if raw[:2] == b"\x1f\x8b":
            with gzip.GzipFile(fileobj=BytesIO(raw)) as packed:
                raw = packed.read(MAX_FILE_BYTES + 1)
            if len(raw) > MAX_FILE_BYTES:
                raise TraceError(
                    f"{path}: the unpacked file would be larger than {MAX_FILE_BYTES >> 20} MiB"
                )
        return raw.decode()
    except InputError as error:
        raise TraceError(str(error)) from error
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise TraceError(f"{path}: damaged gzip data: {error}") from error
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise TraceError(f"{path}: not UTF-8 text: {error}") from error
