"""Trace files as text with line numbers, plain or gzip-compressed, and counts of skipped rows."""

from __future__ import annotations

import gzip
import io
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import numpy.typing as npt

from simkv.core.errors import InputError
from simkv.core.input_files import BoundedLines, open_bytes
from simkv.workload.request_columns import Flags, NameTable, RequestRows
from simkv.workload.trace_selection import Selection

#: Number of rows per batch: large enough for numpy, small enough for the CPU cache.
BATCH_ROWS = 4096


@dataclass
class Tally:
    """Counts of rows read and left out.

    - ``rows``: number of rows read.
    - ``failed``: number of requests that failed in the recorded system, by reason.
    - ``bad``: number of unreadable rows, by reason.
    - ``first``: line of the first row left out, by reason.
    - ``notes``: remarks about the trace for the user.
    """

    rows: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    bad: Counter[str] = field(default_factory=Counter)
    first: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def left_out(self) -> int:
        return self.failed.total() + self.bad.total()

    def lines(self) -> list[str]:
        """Return sentences about the rows left out, and the notes."""
        told = []
        for kind, counts in (("bad rows", self.bad), ("failed requests", self.failed)):
            if counts:
                reasons = "; ".join(
                    f"{count:,} {reason} (first: line {self.first[reason]})"
                    for reason, count in counts.most_common()
                )
                told.append(f"{counts.total():,} of {self.rows:,} {kind} excluded: {reasons}")
        return [*told, *self.notes]


class TraceSource:
    """A trace that is being read: path, selection, tables of names, and row counts."""

    def __init__(
        self,
        path: Path,
        selection: Selection | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        self.path = path
        self.selection = selection or Selection()
        self.tally = Tally()
        self.streams = NameTable()
        self.sessions = NameTable()
        self.loras = NameTable()
        self.clients = NameTable()
        self.line = 0
        self._at: Callable[[], int] = lambda: 0
        self._progress = progress
        self._origin: int | float | None = None

    def bad(self, line: int, column: str, what: str, path: Path | None = None) -> None:
        """Raise InputError for an invalid row or, with ``skip_bad``, count the row.

        ``what`` states the expected and the found value. ``path`` is the file of the row if the
        trace is a directory.
        """
        # The two parts of ``what`` are separated by "; found ".
        if not self.selection.skip_bad:
            raise InputError(
                f"{path or self.path}:{line}: {column}: {what} "
                "(set skip_bad or --skip-bad to exclude and count such rows)"
            )
        reason = f"{column}: {what.partition('; found ')[0]}"
        self.tally.bad[reason] += 1
        self.tally.first.setdefault(reason, line)

    def failed(self, reason: str, rows: Flags, lines: Sequence[int]) -> None:
        """Count failed requests: those for which ``rows`` is true."""
        count = int(rows.sum())
        if count:
            self.tally.failed[reason] += count
            self.tally.first.setdefault(reason, lines[int(np.flatnonzero(rows)[0])])

    def since_first(self, times: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return times relative to the time of the first row."""
        if self._origin is None and len(times):
            self._origin = times[0]
        return times if self._origin is None else times - self._origin

    def error(self, what: str, line: int | None = None, path: Path | None = None) -> InputError:
        """Return an error about the whole file, or about one line."""
        # ``path`` is the file in a folder.
        return InputError(f"{path or self.path}{'' if line is None else f':{line}'}: {what}")

    @contextmanager
    def text(self, path: Path | None = None, newline: str = "") -> Iterator[IO[str]]:
        """Open the file as text, decompressed if necessary.

        Raises InputError if the file cannot be read, or if compressed data are truncated or
        damaged.
        """
        # Bytes that are not UTF-8 are escaped. ``newline`` has the same meaning as in ``open``:
        # with a line feed, carriage returns do not end a line.
        path = path or self.path
        self.line = 0
        try:
            with open_binary(path) as raw:
                stream = cast(IO[bytes], BoundedLines(decompress(raw), path))
                with io.TextIOWrapper(
                    stream, encoding="utf-8-sig", errors="surrogateescape", newline=newline
                ) as lines:
                    self._at = raw.tell
                    yield lines
        except EOFError as error:
            raise InputError(
                f"{path}: incomplete gzip data: the file ends after line {self.line} or a later "
                "line; download the file again"
            ) from error
        except (zlib.error, gzip.BadGzipFile) as error:
            raise InputError(
                f"{path}: damaged gzip data after line {self.line} or later; "
                "download the file again"
            ) from error
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise InputError(f"{path}: cannot be read: {reason}") from error

    def batches(
        self, lines: Iterator[str], line: int = 1, quoted: bool = False
    ) -> Iterator[tuple[int, list[str]]]:
        """Yield batches of lines, each with the number of its first line."""
        # The first number is ``line``. With ``quoted``, a quoted CSV field that spans lines stays
        # in one batch.
        while batch := list(islice(lines, BATCH_ROWS)):
            if quoted:
                open_quote = sum(text.count('"') for text in batch) % 2
                while open_quote and (more := next(lines, None)):
                    batch.append(more)
                    open_quote ^= more.count('"') % 2
            yield line, batch
            line += len(batch)
            self.line = line - 1
            if self._progress:
                self._progress(self._at())


def open_binary(path: Path) -> IO[bytes]:
    return open_bytes(path)


def decompress(raw: IO[bytes]) -> IO[bytes]:
    """Return the stream, decompressed if it is gzip data."""
    magic = raw.read(2)
    raw.seek(0)
    return cast(IO[bytes], gzip.GzipFile(fileobj=raw)) if magic == b"\x1f\x8b" else raw


def select_served(source: TraceSource, rows: RequestRows, lines: Sequence[int]) -> RequestRows:
    """Return the requests with a prompt and an answer. Count the others as failed."""
    silent = rows.output_tokens == 0
    empty = (rows.prompt_tokens == 0) & ~silent
    source.failed("with no output token", silent, lines)
    source.failed("with no prompt token", empty, lines)
    return rows.where(~(silent | empty))
