"""What a sweep has done: a file of JSON lines that only ever grows, one line per finished point."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from simkv.core.files import disk_errors

Summary = dict[str, Any]


def read_store(path: Path) -> dict[str, Summary]:
    """The figures of every finished point, by digest.

    A line that was torn by a crash, wherever it is, does not count. Raises InputError if the file
    cannot be read.
    """
    with disk_errors(path, "read"):
        lines = path.read_bytes().split(b"\n") if path.exists() else []
    done = {}
    for line in lines:
        try:
            entry = json.loads(line)
            done[str(entry["digest"])] = dict(entry["summary"])
        except (ValueError, KeyError, TypeError):
            continue
    return done


@contextmanager
def appending(path: Path | None) -> Iterator[Callable[[str, Summary], Summary]]:
    """A function that adds a finished point: its digest and figures, in one write of one line.

    It returns the figures as ``read_store`` will; without a file it does nothing else.
    """
    if path is None:
        yield lambda _, summary: _through(summary)
        return
    with disk_errors(path, "written"):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        _end_line(file)

        def append(digest: str, summary: Summary) -> Summary:
            with disk_errors(path, "written"):
                _write(file, _line({"digest": digest, "summary": summary}))
            return _through(summary)

        yield append
    finally:
        os.close(file)


def _line(entry: Any) -> bytes:
    return json.dumps(entry, allow_nan=False).encode() + b"\n"


def _through(summary: Summary) -> Summary:
    """The figures as they are after they have been written and read."""
    found: Summary = json.loads(_line(summary))
    return found


def _end_line(file: int) -> None:
    """A line that was torn stays, but nothing is added to it."""
    if os.lseek(file, 0, os.SEEK_END):
        os.lseek(file, -1, os.SEEK_END)
        if os.read(file, 1) != b"\n":
            _write(file, b"\n")


def _write(file: int, line: bytes) -> None:
    """As a rule in one go; a signal may split it, and then the rest follows."""
    while line:
        line = line[os.write(file, line) :]
