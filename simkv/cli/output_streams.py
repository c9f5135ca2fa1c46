"""Standard output and error that tolerate a full disk, a closed pipe and unencodable text.

If a reader closes the pipe (``| head -1``), the remaining output is discarded and the exit code
does not change. A full disk is reported in one line, with exit code 2.
"""

from __future__ import annotations

import io
import sys
from typing import Any


class TolerantFile(io.FileIO):
    """File that discards data that cannot be written, and stores the first error."""

    error: OSError | None = None

    def write(self, data: Any, /) -> int:
        """Write the data, or store the error. Returns the size of the data in either case."""
        if self.error is None:
            try:
                return super().write(data) or 0
            except OSError as error:
                self.error = error
        return memoryview(data).nbytes


def tolerate_write_errors() -> None:
    """Replace standard output and standard error by streams that tolerate write and encoding
    errors.
    """
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
    """Flush standard output; return the exit code, or 2 with a message if writing failed."""
    raw: Any = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    sys.stdout.flush()
    error = raw.error if isinstance(raw, TolerantFile) else None
    if error is None or isinstance(error, BrokenPipeError):
        return code
    reason = (error.strerror or str(error)).lower()
    print(f"simkv: standard output: cannot be written: {reason}", file=sys.stderr)
    return 2
