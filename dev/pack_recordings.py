"""Pack recordings of decisions into one file.

python -m dev.pack_recordings tests/conformance/traces/vllm/0.34.0.jsonl.gz RECORDINGS...

RECORDINGS are files and directories. To add to an existing packed file, include it in RECORDINGS.
If two recordings have the same variant and case, the last one is written. The cases are sorted, so
equal recordings give equal bytes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from simkv.conformance.decision_trace import DecisionTrace, pack_traces, read_traces
from simkv.core.atomic_files import write_bytes


def pack(out: Path, paths: Iterable[Path]) -> int:
    """Write the recordings in ``paths`` to the file ``out`` and return their number."""
    traces: dict[tuple[str, str], DecisionTrace] = {}
    for path in paths:
        for trace in read_traces(path):
            traces[trace.header["variant"], trace.header["case"]] = trace
    write_bytes(out, pack_traces(traces[key] for key in sorted(traces)))
    return len(traces)


if __name__ == "__main__":
    out, *paths = map(Path, sys.argv[1:])
    print(f"{out}: {pack(out, paths)} recordings")
