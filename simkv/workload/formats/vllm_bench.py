"""Reader of ``vllm bench serve --save-result --save-detailed``: a JSON object of parallel lists.

``input_lens`` and ``output_lens`` are in tokens. ``start_times`` contains the times (s) at which
requests were sent (with ``--max-concurrency``, after they waited in the client); the first of them
is time 0. Requests with an entry in ``errors`` are left out and counted. ``ttfts`` and ``itls`` are
in s.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from simkv.workload.column_values import MAX_SHOWN_CHARACTERS
from simkv.workload.formats.trace_format import FileHead, TraceFormat
from simkv.workload.json_records import json_integer, json_time
from simkv.workload.request_columns import Flags, RequestRows
from simkv.workload.trace_source import TraceSource, select_served

if TYPE_CHECKING:
    import pandas as pd

_LISTS = ("input_lens", "output_lens", "start_times")


def _rows(source: TraceSource) -> Iterator[RequestRows]:
    yield _of_result(source, _result(source))


def _result(source: TraceSource) -> Any:
    """Return the last result in a file."""
    with source.text() as lines:
        text = lines.read()
    try:
        results = [json.loads(text)]
    except (ValueError, RecursionError):
        results = _appended(source, text)
    if len(results) > 1:
        source.tally.notes.append(f"using the last of {len(results)} appended results")
    return results[-1]


def read_request_table(source: TraceSource) -> pd.DataFrame:
    """Return one row per request, in order of arrival. Failed requests have no answer."""
    # ``read_measured_latencies`` describes the columns.
    import pandas as pd

    result = _result(source)
    rows = _columns(source, result)
    assert rows.number is not None
    good = rows.number.tolist()
    times = [result.get(name) for name in ("ttfts", "itls")]
    if any(not isinstance(some, list) or len(some) <= max(good, default=-1) for some in times):
        raise source.error("missing lists ttfts, itls; record them with --save-detailed")
    ttfts, itls = times
    try:
        first = np.array([float(ttfts[index] or 0) for index in good])
        later = np.array([float(sum(itls[index] or ())) for index in good])
    except (TypeError, ValueError, OverflowError) as error:
        raise source.error("ttfts, itls: should be numbers and lists of numbers") from error
    answered = (rows.output_tokens > 0) & ~_with_error(result, good)
    steps = np.where(rows.output_tokens > 1, rows.output_tokens - 1, np.nan)
    read = pd.DataFrame(
        {
            "arrival_s": rows.arrival,
            "prompt_tokens": rows.prompt_tokens,
            "output_tokens": np.where(answered, rows.output_tokens, 0),
            "ttft_ms": np.where(answered, 1e3 * first, np.nan),
            "tpot_ms": np.where(answered, 1e3 * later / steps, np.nan),
            "e2e_ms": np.where(answered, 1e3 * (first + later), np.nan),
            "queue_ms": np.nan,
        }
    )
    return read.sort_values("arrival_s", kind="stable", ignore_index=True)


def _appended(source: TraceSource, text: str) -> list[Any]:
    """Return the results in a file written with ``--append-result``, one per line."""
    try:
        return [json.loads(line) for line in text.splitlines() if line.strip()]
    except (ValueError, RecursionError) as error:
        raise source.error(f"should be JSON; found {str(error)[:MAX_SHOWN_CHARACTERS]}") from error


def _of_result(source: TraceSource, result: Any) -> RequestRows:
    """Return the requests in ``result`` that have an answer."""
    rows = _columns(source, result)
    assert rows.number is not None
    good = rows.number.tolist()
    failed = _with_error(result, good)
    source.failed("with an error", failed, good)
    left = [index for index, bad in zip(good, failed, strict=True) if not bad]
    return select_served(source, rows.where(~failed), left)


def _columns(source: TraceSource, result: Any) -> RequestRows:
    """Return all requests with valid values. ``number`` is their index in the lists."""
    if not isinstance(result, dict):
        raise source.error("should be a JSON object with the result of a benchmark")
    missing = [name for name in _LISTS if not isinstance(result.get(name), list)]
    if missing:
        raise source.error(f"missing lists {', '.join(missing)}; record them with --save-detailed")
    lengths = {len(result[name]) for name in _LISTS}
    if len(lengths) > 1:
        raise source.error(f"{', '.join(_LISTS)} should have equal lengths")
    if result.get("max_concurrency"):
        source.tally.notes.append(
            f"measured with max_concurrency {result['max_concurrency']}: arrivals are the "
            "times at which the client sent the requests"
        )
    good = [index for index in range(lengths.pop()) if _is_good(source, result, index)]
    columns = ([result[name][index] for index in good] for name in _LISTS)
    prompts, outputs, starts = (np.array(column, np.float64) for column in columns)
    return RequestRows(
        arrival=starts - starts.min() if len(good) else starts,
        prompt_tokens=prompts.astype(np.int64),
        output_tokens=outputs.astype(np.int64),
        number=np.array(good, np.int64),
    )


def _is_good(source: TraceSource, result: dict[str, Any], index: int) -> bool:
    """Return whether the values of a request are valid."""
    # Error messages give the index of the request in the lists.
    source.tally.rows += 1
    try:
        json_integer({"input_lens": result["input_lens"][index]}, "input_lens")
        json_integer({"output_lens": result["output_lens"][index]}, "output_lens")
        json_time({"start_times": result["start_times"][index]}, "start_times")
    except ValueError as error:
        column, _, what = str(error).partition(": ")
        source.bad(1, f"{column}[{index}]", what)
        return False
    return True


def _with_error(result: dict[str, Any], good: list[int]) -> Flags:
    errors = result.get("errors")
    if not isinstance(errors, list):
        return np.zeros(len(good), np.bool_)
    return np.array([index < len(errors) and bool(errors[index]) for index in good], np.bool_)


def _known(head: FileHead) -> bool:
    return head.kind == "json" and (
        head.has("input_lens", "output_lens") or head.has("backend", "num_prompts", "completed")
    )


BENCH = TraceFormat(
    "vllm-bench",
    "results of vllm bench serve --save-detailed (JSON)",
    _known,
    _rows,
    table=read_request_table,
)
