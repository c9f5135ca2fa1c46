"""Reader of genai-perf's ``profile_export.json`` (Perf Analyzer), with estimated lengths.

``experiments[].requests[]`` has ``timestamp`` and ``response_timestamps`` in ns,
``response_outputs`` and ``request_inputs``. The file contains no token counts, because genai-perf
computes them later with the model's tokenizer. This reader counts one output token for each
response with text, as streaming servers send them, and one prompt token for every
``CHARACTERS_PER_TOKEN`` characters.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from simkv.workload.column_values import MAX_SHOWN_CHARACTERS, describe_found
from simkv.workload.formats.otel_spans import rows_from_spans
from simkv.workload.formats.trace_format import FileHead, TraceFormat
from simkv.workload.json_records import json_time
from simkv.workload.request_columns import RequestRows
from simkv.workload.trace_source import TraceSource

if TYPE_CHECKING:
    import pandas as pd

#: Approximate characters per token of English text.
CHARACTERS_PER_TOKEN = 4


def read_request_table(source: TraceSource) -> pd.DataFrame:
    """Return one row per request, in order of arrival."""
    # ``read_measured_latencies`` describes the columns.
    import pandas as pd

    with source.text() as lines:
        try:
            report = json.load(lines)
        except (ValueError, RecursionError) as error:
            raise source.error(
                f"should be JSON; found {str(error)[:MAX_SHOWN_CHARACTERS]}"
            ) from error
    rows = []
    for number, experiment in enumerate(report["experiments"]):
        for index, record in enumerate(experiment.get("requests") or ()):
            source.tally.rows += 1
            try:
                rows.append(_row(record))
            except ValueError as error:
                column, _, what = str(error).partition(": ")
                source.bad(1, f"experiments[{number}].requests[{index}].{column}", what)
    if not rows:
        raise source.error("contains no requests")
    source.tally.notes.append(
        "the genai-perf export contains no lengths; assumed: one prompt token per "
        f"{CHARACTERS_PER_TOKEN} characters, one output token per response; if this is wrong, use "
        "another source or set lengths"
    )
    read = pd.DataFrame(rows).sort_values("start_s", kind="stable", ignore_index=True)
    return read.assign(arrival_s=read["start_s"] - read["start_s"].min(), line=1)


def _row(record: dict[str, Any]) -> dict[str, Any]:
    start = json_time(record, "timestamp")
    times, texts = record.get("response_timestamps"), record.get("response_outputs") or []
    if not isinstance(times, list) or not all(isinstance(time, int | float) for time in times):
        raise ValueError(
            f"response_timestamps: should be a list of numbers; {describe_found(times)}"
        )
    brought = [t for t, text in zip(times, texts, strict=False) if _brings(text)] or times
    answered = bool(brought)
    first, last = (brought[0], brought[-1]) if answered else (np.nan, np.nan)
    count = len(brought)
    return {
        "start_s": start / 1e9,
        "prompt_tokens": max(
            round(_characters(record.get("request_inputs")) / CHARACTERS_PER_TOKEN), 1
        ),
        "output_tokens": count,
        "ttft_ms": (first - start) / 1e6,
        "tpot_ms": (last - first) / 1e6 / (count - 1) if count > 1 else np.nan,
        "e2e_ms": (last - start) / 1e6,
        "queue_ms": np.nan,
    }


def _brings(output: Any) -> bool:
    """Return whether a response contains text."""
    # The response that only ends the stream has no text.
    text = output if isinstance(output, str) else json.dumps(output)
    return bool(text.strip()) and "[DONE]" not in text


def _characters(inputs: Any) -> int:
    """Return the number of text characters in a request's payload."""
    if isinstance(inputs, dict) and isinstance(inputs.get("payload"), str):
        try:
            inputs = json.loads(inputs["payload"])
        except ValueError:
            return len(inputs["payload"])
    if isinstance(inputs, dict):
        return sum(
            _characters(inputs[key])
            for key in ("prompt", "messages", "content", "text")
            if key in inputs
        )
    if isinstance(inputs, list):
        return sum(_characters(item) for item in inputs)
    return len(inputs) if isinstance(inputs, str) else 0


def _rows(source: TraceSource) -> Iterator[RequestRows]:
    yield rows_from_spans(source, read_request_table(source))


def _known(head: FileHead) -> bool:
    return head.kind == "json" and head.has("experiments", "requests", "response_timestamps")


GENAI_PERF = TraceFormat(
    "genai-perf",
    "genai-perf's profile_export.json, lengths estimated",
    _known,
    _rows,
    table=read_request_table,
)
