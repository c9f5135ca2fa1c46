"""Read the lines of a server's log one by one, with their times.

A time may be ``09-13 12:00:00`` (vLLM), ``[2026-09-13 12:00:00]`` (SGLang),
``[09/13/2026-12:00:00]`` (TensorRT-LLM), ``[12:00:00 TP0]`` (older versions of SGLang) or an ISO
8601 prefix of a container runtime or systemd. Of several times in a line, the last one is used. A
missing year is taken from another time in the line, or is ``YEAR``. Local times are treated as UTC;
``source_join.join`` corrects them. ``log_wrappers`` removes the text that log collectors add to a
line.
"""

from __future__ import annotations

import re
from calendar import timegm
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from simkv.core.errors import InputError
from simkv.core.input_files import MAX_FILE_BYTES
from simkv.incident.bounded_table import check_size
from simkv.incident.evidence import StatedSetting
from simkv.incident.log_wrappers import export_lines, split_line, unwrap
from simkv.workload.trace_source import TraceSource

#: Default year; it is a leap year, so every calendar day is valid.
YEAR = 2024
_TIME = re.compile(
    r"(?<!\d)(?:(?P<year>20\d\d)[-/])?(?P<month>0[1-9]|1[0-2])[-/](?P<day>0[1-9]|[12]\d|3[01])[ T]"
    r"(?P<clock>[0-2]\d:[0-5]\d:[0-6]\d)(?P<part>[.,]\d{1,9})?(?P<zone>Z|[+-]\d\d:?\d\d)?"
)
#: Container name as written by compose, and the server's process.
_WRITER = re.compile(r"(?:([\w.-]+) +\| )?(?:\((?:APIServer|ApiServer_\d+) (pid=\d+)\))?")
_CLOCK = re.compile(r"\[(\d\d:\d\d:\d\d)[ \]]")
#: Times of TensorRT-LLM (month, day, year) and of syslog.
_US_TIME = re.compile(r"\[(\d\d)/(\d\d)/(20\d\d)-(\d\d:\d\d:\d\d)\]")
_SYSLOG = re.compile(
    r"(Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec) +(\d{1,2}) (\d\d:\d\d:\d\d) "
)
_BYTES = re.compile(r"\"MESSAGE\" ?: ?\[")
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
#: Number of characters that are examined to detect a JSON document.
HEAD_CHARACTERS = 1 << 16
#: Maximum length of a line; longer lines are cut, because servers log prompts in full.
MAX_LINE_LENGTH = 1 << 20
DAY = 86400.0
HALF_A_YEAR = 183 * DAY


@dataclass(frozen=True)
class LogLine:
    """A line of a log.

    ``at`` is the time in seconds, or None before the first time in the log. ``timed`` is false if
    the line has the time of an earlier line.
    """

    number: int
    text: str
    at: float | None
    timed: bool = True


def read_log_lines(source: TraceSource, words: re.Pattern[str]) -> Iterator[LogLine]:
    """Yield the lines of a log that match ``words``, in order.

    Line numbers count line feeds, as in ``grep -n``.
    """
    clock = _LogClock()
    for number, raw in _physical_lines(source):
        if not words.search(raw):
            continue
        for part in split_line(raw):
            text = part[:MAX_LINE_LENGTH]
            if words.search(text):
                timed = clock.read(text)
                yield LogLine(number, text, clock.at, timed)


class _LogClock:
    """Clock of a log: ``at`` is the time in seconds of the last line that has a time.

    Times of a log collector are converted to the server's clock.
    """

    def __init__(self) -> None:
        self.at: float | None = None
        self.year, self.offset = YEAR, 0.0

    def read(self, text: str) -> bool:
        """Set ``at`` to the time of a line, and return whether the line has a time."""
        if found := list(_TIME.finditer(text[:160])):
            self.at = self._dated(found)
            if clock := _SYSLOG.match(text):
                self.offset = self.at - self._of_syslog(clock)
        elif clock := _CLOCK.search(text[:80]):
            self.at = _after(self.at, _second(self.year, "01", "01", clock[1]))
        elif clock := _US_TIME.search(text[:80]):
            self.at = _second(int(clock[3]), clock[1], clock[2], clock[4])
        elif clock := _SYSLOG.match(text):
            self.at = self._of_syslog(clock) + self.offset
        else:
            return False
        return True

    def _of_syslog(self, clock: re.Match[str]) -> float:
        month = f"{_MONTHS.index(clock[1]) + 1:02d}"
        return _second(self.year, month, f"{int(clock[2]):02d}", clock[3])

    def _dated(self, found: Sequence[re.Match[str]]) -> float:
        match = found[-1]
        years = [int(one["year"]) for one in found if one["year"]]
        self.year = years[-1] if years else self.year
        time = _seconds(self.year, match)
        if len(found) > 1:
            self.offset = time - _seconds(int(found[0]["year"] or self.year), found[0])
        elif match["year"]:
            time += self.offset
        if self.at is not None and self.at - time > HALF_A_YEAR and not years:
            self.year += 1  # the log continues into the next year
            time = _seconds(self.year, match)
        return time


def _physical_lines(source: TraceSource) -> Iterator[tuple[int, str]]:
    """Yield the lines of a log with their numbers.

    If the file is one JSON document, the messages of its entries count as lines.
    """
    if (entries := read_export(source)) is not None:
        yield from enumerate(entries, start=1)
        return
    with source.text(newline="\n") as stream:
        for start, batch in source.batches(stream):
            for number, raw in enumerate(batch, start):
                # journald writes a message with control characters as a list of bytes.
                yield number, (unwrap(raw) or raw) if _BYTES.search(raw[:4096]) else raw


def read_beginning(source: TraceSource, characters: int) -> str:
    """Return at most ``characters`` characters from the beginning of a log."""
    if (entries := read_export(source)) is not None:
        return "\n".join(entries)
    with source.text() as stream:
        text = stream.read(characters)
    if _BYTES.search(text[:4096]):
        return "\n".join(unwrap(line) or line for line in text.splitlines())
    return text


def read_export(source: TraceSource) -> list[str] | None:
    """Return the log messages in a file that is one JSON document, or None for any other file."""
    with source.text() as stream:
        head = stream.read(HEAD_CHARACTERS).lstrip()
    first = head.partition("\n")[0].strip()
    if head[:1] not in ("[", "{") or (first not in ("[", "{") and unwrap(first) is not None):
        return None
    if source.path.stat().st_size > MAX_FILE_BYTES:
        return None
    with source.text() as stream:
        return export_lines(stream.read())


def read_line(readers: Sequence[Callable[[Any, LogLine], bool]], log: Any, line: LogLine) -> None:
    """Pass a line to the readers, one after the other, until a reader returns true.

    Raises InputError with file and line if a value is not possible.
    """
    try:
        any(reader(log, line) for reader in readers)
    except (ValueError, ArithmeticError, SyntaxError, TypeError, AttributeError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0][:80]
        where = f"{log.path}:{line.number}"
        raise InputError(f"{where}: contains an impossible value: {reason}") from error


def check_settings(settings: Mapping[str, StatedSetting]) -> None:
    """Raise InputError if a setting has a number that is not possible."""
    for name, stated in settings.items():
        try:
            check_size(name, stated.value)
        except ValueError as error:
            raise InputError(f"{stated.where}: contains an impossible value: {error}") from None


#: Access lines of uvicorn for requests that generate tokens, with path and status.
ACCESS = re.compile(
    r"\"POST /\S*?(?:completions|responses|messages|generate|invocations|generate_stream)(?:\?\S*)?"
    r" HTTP/[\d.]+\\?\" (?P<status>\d{3})"
)


class Writers:
    """The servers (container and process) that wrote the lines of each engine in a log."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._seen: dict[int, list[str]] = {}

    def check(self, line: LogLine, engine: int) -> None:
        """Raise InputError if two servers alternately write lines of one engine."""
        found = _WRITER.match(line.text)
        name = " ".join(filter(None, found.groups())) if found else ""
        seen = self._seen.setdefault(engine, [])
        if name in seen[:-1]:
            raise InputError(
                f"{self.path}:{line.number}: this line belongs to {name or 'another server'}, "
                f"but earlier lines belong to {seen[-1]}; expected the log of one server. Split "
                "the log into one file per server"
            )
        if seen[-1:] != [name]:
            seen.append(name)


def _after(before: float | None, time: float) -> float:
    """Return the time in seconds for a time of day without a date.

    The date is that of the previous line, whose time is ``before``, or the next day if the time of
    day is more than twelve hours earlier.
    """
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
