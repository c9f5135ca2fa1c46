"""Read lines of a server's log with their times, without color codes, in a streaming way.

Three formats of times are read: ``09-13 12:00:00`` (vLLM), ``[2026-09-13 12:00:00]`` (SGLang) and
ISO 8601 prefixes of container runtimes and systemd. The last time in a line is used. Old SGLang
writes ``[12:00:00 TP0]``. vLLM's format has no year; it is taken from another time in the same
line, else from ``YEAR``. Times are local; they are counted as if they were UTC, and ``join`` shifts
them. A line may be a JSON object with the message in it, as the JSON formatters of logging
(``VLLM_LOGGING_CONFIG_PATH``, ``--logging-config.formatter json``) and container runtimes write it.
"""

from __future__ import annotations

import json
import re
from calendar import timegm
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

from simkv.core.errors import InputError
from simkv.incident.bounded_table import check_size
from simkv.incident.evidence import StatedSetting
from simkv.workload.trace_source import TraceSource

#: Default year; a leap year, so that every calendar day is valid.
YEAR = 2024
_COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_TIME = re.compile(
    r"(?<!\d)(?:(?P<year>20\d\d)[-/])?(?P<month>0[1-9]|1[0-2])[-/](?P<day>0[1-9]|[12]\d|3[01])[ T]"
    r"(?P<clock>[0-2]\d:[0-5]\d:[0-6]\d)(?P<part>[.,]\d{1,9})?(?P<zone>Z|[+-]\d\d:?\d\d)?"
)
#: Container name as written by compose, and the server's process.
_WRITER = re.compile(r"(?:([\w.-]+) +\| )?(?:\((?:APIServer|ApiServer_\d+) (pid=\d+)\))?")
_CLOCK = re.compile(r"\[(\d\d:\d\d:\d\d)[ \]]")
#: Keys of the message and its time in JSON formatters.
_MESSAGE = ("message", "msg", "log")
_WHEN = ("asctime", "timestamp", "@timestamp", "time", "ts", "created")
#: Times above this value are in milliseconds.
_MILLISECONDS = 1e11
#: Longer lines are cut, because prompts are logged in full.
MAX_LINE_LENGTH = 1 << 20
DAY = 86400.0
HALF_A_YEAR = 183 * DAY


@dataclass(frozen=True)
class LogLine:
    """A line of a log.

    ``at`` is its time (s). A line without a time has the time of the previous line; None before the
    first time.
    """

    number: int
    text: str
    at: float | None


def read_log_lines(source: TraceSource, words: re.Pattern[str]) -> Iterator[LogLine]:
    """Yield the lines that match ``words``, in order; other lines are not parsed."""
    at: float | None = None
    year = YEAR
    with source.text() as stream:
        for start, batch in source.batches(stream):
            for number, raw in enumerate(batch, start):
                if not words.search(raw):
                    continue
                text = (_message(raw) or raw)[:MAX_LINE_LENGTH].strip()
                if "\x1b" in text:
                    text = _COLOURS.sub("", text)
                found = list(_TIME.finditer(text[:160]))
                if found:
                    told = [int(match["year"]) for match in found if match["year"]]
                    match = found[-1]
                    year = told[-1] if told else year
                    time = _seconds(year, match)
                    if at is not None and at - time > HALF_A_YEAR and not told:
                        year += 1  # the log continues into the next year
                        time = _seconds(year, match)
                    at = time
                elif clock := _CLOCK.search(text[:80]):
                    at = _after(at, _second(year, "01", "01", clock[1]))
                yield LogLine(number, text, at)


def read_line(readers: Sequence[Callable[[Any, LogLine], bool]], log: Any, line: LogLine) -> None:
    """Pass a line to the readers until one recognizes it.

    Raises InputError with file and line for values that no server writes.
    """
    try:
        any(reader(log, line) for reader in readers)
    except (ValueError, ArithmeticError, SyntaxError, TypeError, AttributeError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0][:80]
        where = f"{log.path}:{line.number}"
        raise InputError(f"{where}: has a value that no server writes: {reason}") from error


def check_settings(settings: Mapping[str, StatedSetting]) -> None:
    """Raise InputError if a setting has a number that no server writes."""
    for name, stated in settings.items():
        try:
            check_size(name, stated.value)
        except ValueError as error:
            raise InputError(
                f"{stated.where}: has a value that no server writes: {error}"
            ) from None


def _message(raw: str) -> str | None:
    """Return time and message of a JSON line; None for any other line."""
    if raw[:1] != "{":
        return None
    try:
        told = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    message = next((told[key] for key in _MESSAGE if isinstance(told.get(key), str)), None)
    if message is None:
        return None
    when = next((told[key] for key in _WHEN if told.get(key) is not None), "")
    if isinstance(when, int | float):
        seconds = when / 1e3 if when > _MILLISECONDS else when
        try:
            when = datetime.fromtimestamp(seconds, UTC).replace(tzinfo=None).isoformat(" ")
        except (ValueError, OverflowError, OSError):
            when = ""
    return f"{when} {message}"


def is_json_log(text: str) -> bool:
    """Return whether the first line of a file's text is a JSON object with a message."""
    return _message(text.lstrip().partition("\n")[0]) is not None


class Writers:
    """The servers (container and process) that wrote the lines of each engine in a log."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._seen: dict[int, list[str]] = {}

    def check(self, line: LogLine, engine: int) -> None:
        """Raise InputError if two servers write lines of the same engine in turn.

        Such servers ran at the same time; a server that was only restarted does not alternate.
        """
        found = _WRITER.match(line.text)
        name = " ".join(filter(None, found.groups())) if found else ""
        seen = self._seen.setdefault(engine, [])
        if name in seen[:-1]:
            raise InputError(
                f"{self.path}:{line.number}: is of {name or 'another server'}, and lines before it "
                f"of {seen[-1]}; expected the log of one server: give each a file of its own"
            )
        if seen[-1:] != [name]:
            seen.append(name)


def _after(before: float | None, time: float) -> float:
    """Resolve a time without a date: on the day of the previous line, or after midnight."""
    if before is None:
        return time
    at = before - before % DAY + time % DAY
    return at + DAY if before - at > DAY / 2 else at


def _seconds(year: int, match: re.Match[str]) -> float:
    part = match["part"]
    fraction = float(f"0.{part[1:]}") if part else 0.0
    return _second(year, match["month"], match["day"], match["clock"]) + fraction


@lru_cache(maxsize=4096)
def _second(year: int, month: str, day: str, clock: str) -> float:
    hour, minute, second = map(int, clock.split(":"))
    return float(timegm((year, int(month), int(day), hour, minute, second)))
