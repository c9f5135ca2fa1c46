"""Generate the traces in this folder: ``python traces/generate_traces.py``.

Every run writes the same bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path

import numpy as np

from simkv.core.request import Request
from simkv.workload.clients import Dependency
from simkv.workload.formats.simkv_csv import used_columns, write_file
from simkv.workload.formats.simkv_parquet import write_parquet
from simkv.workload.request_columns import (
    PROMPT_STREAM,
    NameTable,
    PromptPieces,
    RequestRows,
    piece_from_segment,
)
from simkv.workload.trace_source import TraceSource
from simkv.workload.workload_section import Workload, build_clients

HERE = Path(__file__).parent

#: Conversations on top of one system prompt, and lone requests in spikes.
WORKLOADS = {
    "chat.csv": {
        "sessions": {
            "num_sessions": 60,
            "request_rate": 0.5,
            "turns": {"distribution": "uniform", "low": 1, "high": 7},
            "prompt_tokens": {"distribution": "lognormal", "mean": 180, "max": 2000},
            "output_tokens": {"distribution": "lognormal", "mean": 220, "max": 1000},
            "think_time": {"distribution": "lognormal", "mean": 8, "sigma": 0.8},
            "prefix_group": "system",
            "prefix_tokens": 512,
            "seed": 1,
        }
    },
    "spikes.csv": {
        "arrivals": {
            "num_prompts": 500,
            "request_rate": 2,
            "burstiness": 0.15,
            "prompt_tokens": {"distribution": "lognormal", "mean": 900, "max": 8000},
            "output_tokens": {"distribution": "zipf", "low": 8, "high": 1024, "exponent": 0.8},
            "prefix_groups": 20,
            "prefix_tokens": 256,
            "prefix_zipf": 1.1,
            "seed": 2,
        }
    },
}


def rows_of(
    requests: Sequence[Request], after: Mapping[int, Dependency], streams: NameTable
) -> RequestRows:
    """Return requests as columns of a trace; ``after`` is as in ``Clients``.

    The requests must be numbered 0, 1, 2, ... in their order.
    """
    thinks = [after[r.id].think_time if r.id in after else math.nan for r in requests]
    sessions: list[int] = []
    fresh = count()
    for request in requests:
        before = after.get(request.id)
        sessions.append(next(fresh) if before is None else sessions[before.before[0]])
    pieces = [
        [
            piece_from_segment(segment, streams)
            for segment in request.segments
            if segment.end > segment.start
        ]
        for request in requests
    ]
    for request, row in zip(requests, pieces, strict=True):
        if row and row[-1][:3] == (PROMPT_STREAM, request.id, 0):
            row.pop()  # the rest of a prompt is unique anyway
    return RequestRows(
        arrival=np.array([r.arrival for r in requests], np.float64),
        prompt_tokens=np.array([r.prompt_tokens for r in requests], np.int64),
        output_tokens=np.array([r.output_tokens for r in requests], np.int64),
        max_tokens=np.array(
            [0 if r.max_tokens == r.output_tokens else r.max_tokens for r in requests], np.int64
        ),
        priority=np.array([r.priority for r in requests], np.int64),
        timeout=np.array([math.nan if r.timeout is None else r.timeout for r in requests]),
        ignore_eos=np.array([r.ignore_eos for r in requests], np.bool_),
        has_images=np.array([r.has_images for r in requests], np.bool_),
        session=np.array(sessions, np.int64) if after else None,
        think_time=np.array(thinks) if after else None,
        number=np.arange(len(requests)),
        pieces=PromptPieces.of(pieces),
    )


def write_requests(
    path: Path, requests: Sequence[Request], after: Mapping[int, tuple[int, float]]
) -> int:
    """Write requests as a trace in simkv's CSV format; return their number."""
    source = TraceSource(path)
    rows = rows_of(requests, after, source.streams)
    for session in range(int(rows.session.max()) + 1 if rows.session is not None else 0):
        source.sessions.number(f"s{session}")
    write = write_parquet if path.suffix == ".parquet" else write_file
    return write(path, [rows], used_columns(rows), source)


def main() -> None:
    """Write all traces of ``WORKLOADS``."""
    for name, form in WORKLOADS.items():
        drawn = build_clients(Workload.model_validate(form), None)
        count = write_requests(HERE / name, drawn.requests, drawn.after)
        print(f"{name}: {count} requests")


if __name__ == "__main__":
    main()
