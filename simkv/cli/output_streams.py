"""Standard output that is full, closed or cannot write all characters: never a traceback.

A reader that goes away (``| head -1``) changes nothing: the rest is thrown away, and the command
ends as it would have. A full disk is one line and exit code 2.
"""

from __future__ import annotations

import io
import sys
from typing import Any


class TolerantFile(io.FileIO):
    """A file that throws away what cannot be written, and keeps the first reason."""

    error: OSError | None = None

    def write(self, data: Any, /) -> int:
        """Write, or note why not and say that all was written."""
        if self.error is None:
            try:
                return super().write(data) or 0
            except OSError as error:
                self.error = error
        return memoryview(data).nbytes


def tolerate_write_errors() -> None:
    """Let standard output and standard error be patient, and replace what they cannot encode."""
    for name in ("stdout", "stderr"):
        stream: Any = getattr(sys, name)
        if stream is None or stream is not getattr(sys, f"__{name}__"):
            continue
        stream.flush()
        raw = io.BufferedWriter(TolerantFile(stream.fileno(), "wb", closefd=False))
        errors = "replace" if stream.errors == "strict" else stream.errors
        new = io.TextIOWrapper(
            raw, stream.encoding, errors, line_buffering=stream.line_buffering or name == "stderr"
        )
        setattr(sys, name, new)


def close_streams(code: object) -> object:
    """Flush; returns the exit code, which is 2 after a line if standard output was not taken."""
    raw: Any = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    sys.stdout.flush()
    error = raw.error if isinstance(raw, TolerantFile) else None
    if error is None or isinstance(error, BrokenPipeError):
        return code
    reason = (error.strerror or str(error)).lower()
    print(f"simkv: standard output: cannot be written: {reason}", file=sys.stderr)
    return 2
