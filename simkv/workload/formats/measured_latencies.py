"""Measured latencies of each request in a trace, for formats that record latencies."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd

from simkv.core.errors import InputError
from simkv.workload.formats.format_detection import detect_format
from simkv.workload.trace_source import TraceSource


def read_measured_latencies(path: Path, source: TraceSource | None = None) -> pd.DataFrame:
    """Return one row per served request, in the order of the file.

    The columns are arrival_s, prompt_tokens and output_tokens, and the latencies ttft_ms, tpot_ms,
    e2e_ms and queue_ms (NaN if not measured). queued_s is the time from which TTFT and E2E are
    counted, if recorded. Raises InputError if the file cannot be used or has no measured times.
    """
    # Formats with a ``table`` may add the columns start_s (since 1970), request (its id),
    # max_tokens, prefill_ms and gave_up_s. They may also add rows for requests without an answer,
    # whose output_tokens is 0. ``source`` is an open source for the file; by default a new one is
    # opened.
    form, path = detect_format(path)
    source = source or TraceSource(path)
    if form.table is not None:
        return form.table(source)
    if form.measured is None:
        raise InputError(f"{path}: format {form.name} has no measured request times")
    rows = list(form.rows(source))
    records = _records(source, path)
    found = []
    for some in rows:
        assert some.number is not None
        for place, arrival, prompt, output in zip(
            some.number.tolist(),
            some.arrival.tolist(),
            some.prompt_tokens.tolist(),
            some.output_tokens.tolist(),
            strict=True,
        ):
            line, record = records[place]
            try:
                times = form.measured(record)
            except ValueError as error:
                raise InputError(f"{path}:{line}: {error}") from error
            found.append((arrival, prompt, output, times))
    table = pd.DataFrame(
        {
            "arrival_s": [arrival for arrival, *_ in found],
            "prompt_tokens": [prompt for _, prompt, *_ in found],
            "output_tokens": [output for *_, output, _ in found],
            "ttft_ms": [times.ttft_ms for *_, times in found],
            "tpot_ms": [times.tpot_ms if output > 1 else None for *_, output, times in found],
            "e2e_ms": [times.e2e_ms for *_, times in found],
            "queue_ms": [times.queue_ms for *_, times in found],
        },
        dtype=float,
    ).astype({"prompt_tokens": int, "output_tokens": int})
    if found and found[0][3].queue_ms is not None:
        table["queued_s"] = table["arrival_s"]
    return table


def _records(source: TraceSource, path: Path) -> list[tuple[int, dict[str, object]]]:
    """Return the line number and the object of each non-empty line in a JSON lines file.

    ``RequestRows.number`` is an index in this list.
    """
    with source.text(path) as lines:
        texts = list(enumerate(lines, start=1))
    return [(line, json.loads(text)) for line, text in texts if text.strip()]
