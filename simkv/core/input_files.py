"""Read input files with a size limit; reject devices and directories.

raw = read_bytes(Path("costs.json"))
with open_bytes(Path("server.log")) as stream:
   ...
"""

from __future__ import annotations

import errno
import io
import os
import stat
from math import inf
from pathlib import Path
from typing import IO

from simkv.core.atomic_files import translate_disk_errors
from simkv.core.errors import InputError

#: Maximum size in bytes of a file that is read as a whole.
MAX_FILE_BYTES = 1 << 27
#: Maximum size in bytes of a table that pandas reads as a whole.
MAX_TABLE_BYTES = 1 << 30
#: Maximum length in bytes of a line in a streamed file; benchmark results are a single line.
MAX_LINE_BYTES = 1 << 28


def check_input(path: Path, pipes: bool = False, most: float = inf) -> None:
    """Raise InputError if ``path`` is not a file of at most ``most`` bytes.

    With ``pipes``, a pipe is also accepted.
    """
    with translate_disk_errors(path, "read"):
        found = path.stat()
        mode = found.st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not (stat.S_ISREG(mode) or (pipes and stat.S_ISFIFO(mode))):
        what = "pipe" if stat.S_ISFIFO(mode) else "socket" if stat.S_ISSOCK(mode) else "device"
        raise InputError(f"{path}: cannot be read: this is a {what}; expected a file")
    if found.st_size > most:
        raise InputError(f"{path}: file is larger than the limit of {int(most) >> 20} MiB")


def open_bytes(path: Path, pipes: bool = False) -> IO[bytes]:
    """Open a file for reading. Raises InputError if it cannot be opened."""
    # A pipe without a writer reads as empty.
    check_input(path, pipes)
    with translate_disk_errors(path, "read"):
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        os.set_blocking(file, True)
        return os.fdopen(file, "rb")


def read_bytes(path: Path, most: int = MAX_FILE_BYTES) -> bytes:
    """Return the content of a file or pipe.

    Raises InputError if the content has more than ``most`` bytes.
    """
    check_input(path, pipes=True, most=most)
    with open_bytes(path, pipes=True) as stream, translate_disk_errors(path, "read"):
        raw = stream.read(most + 1)
    if len(raw) > most:
        raise InputError(f"{path}: file is larger than the limit of {most >> 20} MiB")
    return raw


def read_text(path: Path, encoding: str = "utf-8", most: int = MAX_FILE_BYTES) -> str:
    """Return the content of a text file.

    Raises InputError if the content has more than ``most`` bytes.
    """
    try:
        return read_bytes(path, most).decode(encoding)
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 text") from error


class BoundedLines(io.BufferedIOBase):
    """Byte stream with a limit on line lengths.

    Raises InputError for a line over ``MAX_LINE_BYTES``.
    """

    # Without this limit, a file without line ends, such as a compressed file, would be loaded into
    # memory as a single line.

    def __init__(self, stream: IO[bytes], path: Path) -> None:
        self._stream, self._path, self._line = stream, path, 0

    def readable(self) -> bool:
        return True

    def read(self, size: int | None = -1, /) -> bytes:
        if size is not None and size >= 0:
            return self.read1(size)
        return b"".join(iter(lambda: self.read1(1 << 20), b""))

    def read1(self, size: int = -1, /) -> bytes:
        data = self._stream.read1(size)  # type: ignore[attr-defined]
        end = data.rfind(b"\n")
        self._line = len(data) - end - 1 if end >= 0 else self._line + len(data)
        if self._line > MAX_LINE_BYTES:
            raise InputError(f"{self._path}: a line is longer than {MAX_LINE_BYTES >> 20} MiB")
        return bytes(data)

    def close(self) -> None:
        self._stream.close()
        super().close()
