"""What Prometheus would have scraped of vLLM's requests, as an answer of ``query_range``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from simkv.ingest.emit.clock import BEGIN
from simkv.ingest.replay import times
from simkv.loop.record import Record

Floats = npt.NDArray[np.float64]
#: Seconds between two scrapes.
EVERY = 15.0
#: Bounds of the buckets (vllm/v1/metrics/loggers.py and buckets.py, 0.11 to 0.33), in s and tokens.
LATENCY = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
TOKENS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))
#: Histograms, and the columns of a table of requests that they are of (ms).
_TIMES = {
    "time_to_first_token_seconds": "ttft_ms",
    "e2e_request_latency_seconds": "e2e_ms",
    "request_queue_time_seconds": "queue_ms",
    "request_prefill_time_seconds": "prefill_ms",
}


def query_range(record: Record, every: float = EVERY) -> str:
    """The metrics of a run; ``cache_config_info`` has its blocks."""
    table = times(record)
    requests = pd.DataFrame(
        [
            (life.request.arrival, life.request.prompt_tokens, life.tokens)
            for _, life in sorted(record.lives.items())
        ],
        columns=["t_s", "prompt_tokens", "output_tokens"],
    )
    requests.index = table.index
    return scraped(requests.join(table).assign(t_s=requests["t_s"] + BEGIN), every)


def scraped(requests: pd.DataFrame, every: float = EVERY) -> str:
    """The metrics of a table of requests (as ``read_measured`` has them, with t_s)."""
    done = requests.dropna(subset=["e2e_ms", "ttft_ms"])
    came = requests["t_s"].to_numpy(np.float64)
    end = (done["t_s"] + done["e2e_ms"] / 1e3).to_numpy(np.float64)
    at = np.arange(came.min() - every, (end.max() if len(end) else came.max()) + 2 * every, every)
    result = [*_gauges(requests, done, at), *_histograms(done, end, at)]
    data = {"resultType": "matrix", "result": result}
    return json.dumps({"status": "success", "data": data})


def _gauges(requests: pd.DataFrame, done: pd.DataFrame, at: Floats) -> Iterator[dict[str, Any]]:
    came = np.sort(requests["t_s"].to_numpy(np.float64))
    begun = np.sort((done["t_s"] + done["queue_ms"] / 1e3).to_numpy(np.float64))
    ended = np.sort((done["t_s"] + done["e2e_ms"] / 1e3).to_numpy(np.float64))
    there, taken, gone = (np.searchsorted(one, at, "right") for one in (came, begun, ended))
    yield _metric("num_requests_running", at, taken - gone)
    yield _metric("num_requests_waiting", at, there - taken)


def _histograms(done: pd.DataFrame, end: Floats, at: Floats) -> Iterator[dict[str, Any]]:
    first = (done["t_s"] + done["ttft_ms"] / 1e3).to_numpy(np.float64)
    for name, column in _TIMES.items():
        when = first if column == "ttft_ms" else end
        yield from _histogram(name, done[column].to_numpy(np.float64) / 1e3, when, at, LATENCY)
    for name in ("prompt", "generation"):
        column = "prompt_tokens" if name == "prompt" else "output_tokens"
        values = done[column].to_numpy(np.float64)
        yield from _histogram(f"request_{name}_tokens", values, end, at, TOKENS)
    # Tokens come evenly from the first to the last.
    steps = done["output_tokens"].to_numpy(np.float64) - 1
    share = (at[:, None] - first[None, :]) / np.maximum(end - first, 1e-9)[None, :]
    share = np.clip(share, 0.0, 1.0)
    yield _metric("inter_token_latency_seconds_count", at, share @ steps)
    yield _metric("inter_token_latency_seconds_sum", at, share @ (end - first))


def _histogram(
    name: str, values: Floats, when: Floats, at: Floats, bounds: tuple[float, ...]
) -> Iterator[dict[str, Any]]:
    seen = (when[None, :] <= at[:, None]).astype(np.float64)
    yield _metric(f"{name}_count", at, seen.sum(axis=1))
    yield _metric(f"{name}_sum", at, seen @ values)
    for bound in (*bounds, np.inf):
        edge = "+Inf" if np.isinf(bound) else str(bound)
        yield _metric(f"{name}_bucket", at, seen @ (values <= bound), le=edge)


def _metric(name: str, at: Floats, values: Any, **labels: str) -> dict[str, Any]:
    told = {"__name__": f"vllm:{name}", "engine": "0", "model_name": "simulated", **labels}
    pairs = zip(at.tolist(), np.asarray(values, np.float64).tolist(), strict=True)
    return {"metric": told, "values": [[at, repr(value)] for at, value in pairs]}
