"""Store job results in an append-only file of JSON lines, one line per finished job."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Self

from simkv.core.atomic_files import translate_disk_errors
from simkv.study.simulation_job import Summary


class ResultFile:
    """Summaries of the finished jobs (``done``) by digest, and the file that stores them.

    The file is created with the first result; without a ``path`` there is none. Lines torn by a
    crash are ignored. Raises InputError if the file cannot be read or written. Use it as a context
    manager, which closes the file.
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
        """Store a job's summary in one write of one line, and in ``done`` as it will be read."""
        line = json.dumps({"digest": digest, "summary": summary}, allow_nan=False).encode() + b"\n"
        if self._path is not None:
            with translate_disk_errors(self._path, "written"):
                self._append(self._path, line)
        self.done[digest] = json.loads(line)["summary"]

    def _append(self, path: Path, line: bytes) -> None:
        if self._file < 0:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
            # A torn line stays in the file, but nothing is appended to it.
            if os.lseek(self._file, 0, os.SEEK_END):
                os.lseek(self._file, -1, os.SEEK_END)
                if os.read(self._file, 1) != b"\n":
                    line = b"\n" + line
        while line:  # usually one write; a signal may split it
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
