"""Remove the additions of log collectors from the lines of a server.

A line may be a JSON object that contains the message. Such lines come from the JSON formatters of
logging (``VLLM_LOGGING_CONFIG_PATH``, ``--logging-config.formatter json``), Docker's json-file
driver, ``journalctl -o json``, Fluent Bit, Google Cloud (``textPayload``) and Loki (``line``). An
export may also be one JSON document with many such objects. Other prefixes need no parsing, because
the readers search within a line.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

#: Keys of the message and of its time in JSON lines.
_MESSAGE = ("message", "msg", "log", "MESSAGE", "textPayload", "line", "body", "@message", "_raw")
_WHEN = (
    "asctime",
    "timestamp",
    "@timestamp",
    "time",
    "ts",
    "created",
    "__REALTIME_TIMESTAMP",
    "receiveTimestamp",
)
_COLORS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
#: Beginning of a line of vLLM that follows another line without a line break.
_NEXT_LINE = re.compile(
    r"(?<=%|\.)\s*"
    r"(?=(?:\([\w ]+ pid=\d+\) )?(?:INFO|WARNING|ERROR|DEBUG) \d\d-\d\d \d\d:\d\d:\d\d )"
)
#: Smallest values of a time since 1970 in ns, in µs and in ms.
_UNITS = ((1e17, 1e9), (1e14, 1e6), (1e11, 1e3))


def split_line(raw: str) -> list[str]:
    """Return the log messages in a line of a file, without color codes.

    A line may contain several messages, for example from a progress bar or from two processes.
    """
    text = unwrap(raw) or raw
    if "\x1b" in text:
        text = _COLORS.sub("", text)
    return [
        part.strip()
        for piece in text.split("\r")
        for part in _NEXT_LINE.split(piece)
        if part and part.strip()
    ]


def unwrap(raw: str) -> str | None:
    """Return the time and the message of a JSON line as text, or None for any other line."""
    start = raw.find("{")
    if start < 0:
        return None
    try:
        entry = json.loads(raw[start:].rstrip().rstrip(","))
    except (ValueError, RecursionError):
        return None
    message = _entry(entry)
    return None if message is None else f"{raw[:start].strip()} {message}".strip()


def _entry(entry: Any) -> str | None:
    """Return the time and the message of a JSON object as text, or None if it has no message."""
    if not isinstance(entry, dict):
        return None
    message = next((entry[key] for key in _MESSAGE if key in entry), None)
    if isinstance(message, list):  # journald writes a message with control characters as bytes
        try:
            message = bytes(message).decode("utf-8", "replace")
        except (ValueError, TypeError):
            return None
    if isinstance(message, dict):
        message = _entry(message)
    if not isinstance(message, str):
        inner = entry.get("jsonPayload")
        message = _entry(inner) if isinstance(inner, dict) else None
        if message is None:
            return None
    when = next((entry[key] for key in _WHEN if entry.get(key) is not None), "")
    return f"{_clock(when)} {unwrap(message) or message}".strip()


def _clock(when: Any) -> str:
    """Return a time as text. A number may be in s, ms, µs or ns since 1970."""
    try:
        number = float(when)
    except (TypeError, ValueError):
        return str(when) if isinstance(when, str) else ""
    number /= next((unit for least, unit in _UNITS if number > least), 1.0)
    try:
        return datetime.fromtimestamp(number, UTC).replace(tzinfo=None).isoformat(" ")
    except (ValueError, OverflowError, OSError):
        return ""


def export_lines(text: str) -> list[str] | None:
    """Return the messages in a log that is one JSON document, or None for any other text."""
    if text.lstrip()[:1] not in ("[", "{"):
        return None
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return list(_entries(document)) or None


def _entries(document: Any) -> Iterator[str]:
    if isinstance(document, dict):
        message = _entry(document)
        if message is not None:
            yield message
            return
        for key, value in document.items():
            if key == "values" and isinstance(value, list):
                yield from (
                    f"{_clock(pair[0])} {pair[1]}"
                    for pair in value
                    if isinstance(pair, list) and len(pair) > 1 and _is_text(pair[1])
                )
            else:
                yield from _entries(value)
    elif isinstance(document, list):
        for one in document:
            yield from _entries(one)


def _is_text(value: Any) -> bool:
    if not isinstance(value, str):
        return False
    try:
        float(value)
    except ValueError:
        return True
    return False
