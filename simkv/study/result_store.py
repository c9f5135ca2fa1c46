"""What has been run: a file of JSON lines that only ever grows, one line per finished job."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Self

from simkv.core.atomic_files import translate_disk_errors
from simkv.study.simulation_job import Summary


class ResultFile:
    """The summaries of the jobs that are ``done``, by digest, and the file that keeps them.

    The file is made when there is something to add; without a ``path`` there is none. A line that
    was torn by a crash, wherever it is, does not count. Raises InputError if the file cannot be
    read or written. Use it as a context manager, so that the file is closed.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path, self._file = path, -1
        self.done: dict[str, Summary] = {} if path is None else _read(path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def add(self, digest: str, summary: Summary) -> None:
        """Note what came of a job, in one write of one line, and as it will be read."""
        line = json.dumps({"digest": digest, "summary": summary}, allow_nan=False).encode() + b"\n"
        if self._path is not None:
            with translate_disk_errors(self._path, "written"):
                self._append(self._path, line)
        self.done[digest] = json.loads(line)["summary"]

    def _append(self, path: Path, line: bytes) -> None:
        if self._file < 0:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
            # A line that was torn stays, but nothing is added to it.
            if os.lseek(self._file, 0, os.SEEK_END):
                os.lseek(self._file, -1, os.SEEK_END)
                if os.read(self._file, 1) != b"\n":
                    line = b"\n" + line
        while line:  # as a rule in one go; a signal may split it, and then the rest follows
            line = line[os.write(self._file, line) :]


def _read(path: Path) -> dict[str, Summary]:
    with translate_disk_errors(path, "read"):
        lines = path.read_bytes().split(b"\n") if path.exists() else []
    done: dict[str, Any] = {}
    for line in lines:
        try:
            entry = json.loads(line)
            done[str(entry["digest"])] = dict(entry["summary"])
        except (ValueError, KeyError, TypeError):
            continue
    return done
