"""Write a run's metrics in the format of a Prometheus ``query_range`` response.

Names, labels and buckets are those of vLLM 0.33 or SGLang 0.5.23
(``metrics/prometheus_metrics.py``). vLLM has these metrics since 0.11. Only metrics that a
simulated run provides are written.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from simkv.incident.emit.log_dates import RUN_EPOCH_S
from simkv.incident.incident_simulation import request_times, sample_state
from simkv.metrics.prometheus_metrics import (
    EngineMetric,
    bucket_bounds,
    config_info_metric,
    list_engine_metrics,
)
from simkv.sim.run_record import RequestRecord, RunRecord

Floats = npt.NDArray[np.float64]
#: Seconds between two scrapes.
SCRAPE_INTERVAL_S = 15.0
#: Default maximum request length in tokens, which is the largest bucket of token counts.
DEFAULT_MAX_LENGTH = 131072
#: Values of certain labels; all other labels have the value "0".
LABELS = {
    "model_name": "simulated",
    "engine_type": "unified",
    "is_streaming": "true",
    "cache_source": "device",
}
#: Columns of the request table (in ms or tokens) for each histogram.
_SPREADS = {
    "ttft": "ttft_ms",
    "e2e": "e2e_ms",
    "queue_time": "queue_ms",
    "prefill_time": "prefill_ms",
    "request_prompt_tokens": "prompt_tokens",
    "request_generation_tokens": "output_tokens",
}


def query_range(ranks: Sequence[RunRecord], engine: Any, every: float = SCRAPE_INTERVAL_S) -> str:
    """Return the metrics of a run as JSON text.

    Each data-parallel rank has its number in the label ``engine`` or ``dp_rank``.
    """
    tables = [_told(record) for record in ranks]
    whole = _scrapes(pd.concat(tables), every)
    result = []
    for rank, (record, table) in enumerate(zip(ranks, tables, strict=True)):
        for one in _metrics(table, whole, engine.name, record, engine):
            named = {label: str(rank) for label in ("engine", "dp_rank") if label in one["metric"]}
            result.append({**one, "metric": {**one["metric"], **named}})
    return _matrix(result)


def _told(record: RunRecord) -> pd.DataFrame:
    """Return the requests of a rank as the table that ``scrape_requests`` expects."""
    table = request_times(record)
    lives = [life for _, life in sorted(record.requests.items())]
    requests = pd.DataFrame(
        [
            (one.request.arrival, one.request.prompt_tokens, one.tokens, *_fate(one))
            for one in lives
        ],
        columns=["t_s", "prompt_tokens", "output_tokens", "cached_tokens", "preempted_at"],
        index=table.index,
    )
    return requests.join(table).assign(t_s=requests["t_s"] + RUN_EPOCH_S)


def _fate(life: RequestRecord) -> tuple[int, list[float]]:
    """Return the number of cached prompt tokens, and the times of preemptions."""
    hit = life.chunks[0].context if life.chunks else 0
    return hit, [RUN_EPOCH_S + at for at in life.preempted_at]


def scrape_requests(requests: pd.DataFrame, every: float = SCRAPE_INTERVAL_S) -> str:
    """Return the metrics that vLLM would report for a table of requests.

    The table has the columns of ``read_measured_latencies`` and the arrival time ``t_s``.
    """
    return _matrix(_metrics(requests, _scrapes(requests, every), "vllm"))


def _matrix(result: list[dict[str, Any]]) -> str:
    return json.dumps({"status": "success", "data": {"resultType": "matrix", "result": result}})


def _ends(done: pd.DataFrame) -> Floats:
    return (done["t_s"] + done["e2e_ms"] / 1e3).to_numpy(np.float64)


def _scrapes(requests: pd.DataFrame, every: float) -> Floats:
    """Return the times of scrapes, from before the first arrival until after the last end."""
    came, end = requests["t_s"].to_numpy(np.float64), _ends(requests)
    last = np.nanmax(end) if np.isfinite(end).any() else came.max()
    return np.arange(came.min() - every, last + 2 * every, every)


def _metrics(
    requests: pd.DataFrame,
    at: Floats,
    engine: str,
    record: RunRecord | None = None,
    config: Any = None,
) -> list[dict[str, Any]]:
    """Return the metrics at the times ``at``.

    ``record`` and the engine's ``config`` provide additional metrics.
    """
    done = requests.dropna(subset=["e2e_ms", "ttft_ms"])
    end = _ends(done)
    rows = list_engine_metrics(engine)
    gauges = _gauges(requests, done, at, record)
    if config is not None and engine == "sglang":
        size, page = config.max_total_num_tokens, config.page_size
        gauges |= {"capacity_tokens": np.full(len(at), size), "block_size": np.full(len(at), page)}
    counts = _counters(requests, done, end, at, engine)
    spread = bucket_bounds(rows, DEFAULT_MAX_LENGTH)
    result = []
    for row in rows:
        if row.kind == "gauge" and row.measure in gauges:
            result.append(_metric(row, "", at, gauges[row.measure]))
        elif row.kind == "counter" and row.measure in counts:
            total = "" if row.name.endswith("_total") else "_total"
            result.append(_metric(row, total, at, counts[row.measure]))
        elif row.kind == "histogram":
            result += _histogram(row, done, end, at, np.array(spread[row.measure], np.float64))
    if config is not None and (told := config_info_metric(engine)):
        labels = {knob: str(getattr(config, knob)) for knob in told[1]}
        labels = {"__name__": told[0], "engine": "0", **labels}
        result.append({"metric": labels, "values": [[one, "1"] for one in at.tolist()]})
    return result


def _gauges(
    requests: pd.DataFrame, done: pd.DataFrame, at: Floats, record: RunRecord | None
) -> dict[str, Any]:
    if record is not None:
        made = sample_state([record], at - RUN_EPOCH_S)
        names = ("running", "waiting", "usage")
        return {name: made[name].to_numpy(np.float64) for name in names}
    came = np.sort(requests["t_s"].to_numpy(np.float64))
    begun = np.sort((done["t_s"] + done["queue_ms"] / 1e3).to_numpy(np.float64))
    ended = np.sort((done["t_s"] + done["e2e_ms"] / 1e3).to_numpy(np.float64))
    there, taken, gone = (np.searchsorted(one, at, "right") for one in (came, begun, ended))
    return {"running": (taken - gone).astype(float), "waiting": (there - taken).astype(float)}


def _counters(
    requests: pd.DataFrame, done: pd.DataFrame, end: Floats, at: Floats, engine: str
) -> Mapping[str, Floats]:
    """Return the counters. SGLang counts tokens when a request ends, and vLLM when they are
    emitted.
    """
    prompt = done["prompt_tokens"].to_numpy(np.float64)
    output = done["output_tokens"].to_numpy(np.float64)
    ended = (end[None, :] <= at[:, None]).astype(np.float64)
    found = {"ended": ended.sum(axis=1)}
    if engine == "sglang":
        found |= {"prompt_tokens": ended @ prompt, "generation_tokens": ended @ output}
    else:
        first = (done["t_s"] + done["ttft_ms"] / 1e3).to_numpy(np.float64)
        begun = (first[None, :] <= at[:, None]).astype(np.float64)
        found["prompt_tokens"] = begun @ prompt
        found["generation_tokens"] = (begun + _share(first, end, at) * (output - 1)).sum(axis=1)
    if "cached_tokens" in requests:
        cached = done["cached_tokens"].to_numpy(np.float64)
        taken_in = (done["t_s"] + done["queue_ms"] / 1e3).to_numpy(np.float64)
        looked = (taken_in[None, :] <= at[:, None]).astype(np.float64)
        found |= {"queried": looked @ prompt, "cached": looked @ cached}
        found["cached_by_source"] = ended @ cached
        taken = np.sort(np.array([t for row in requests["preempted_at"] for t in row], np.float64))
        found["preemptions"] = np.searchsorted(taken, at, "right").astype(float)
    return found


def _share(first: Floats, end: Floats, at: Floats) -> Floats:
    """Return the fraction of a request's tokens emitted until each time ``at``, for each request.

    After the first token, which is not counted, a constant rate is assumed.
    """
    share = (at[:, None] - first[None, :]) / np.maximum(end - first, 1e-9)[None, :]
    return np.clip(share, 0.0, 1.0)


def _histogram(
    row: EngineMetric, done: pd.DataFrame, end: Floats, at: Floats, edges: Floats
) -> Iterator[dict[str, Any]]:
    first = (done["t_s"] + done["ttft_ms"] / 1e3).to_numpy(np.float64)
    if row.measure == "itl":
        steps = np.maximum(done["output_tokens"].to_numpy(np.float64) - 1, 0.0)
        values = (end - first) / np.maximum(steps, 1.0)
        seen = _share(first, end, at) * steps
    elif row.measure in _SPREADS:
        column = _SPREADS[row.measure]
        values = done[column].to_numpy(np.float64) / (1e3 if column.endswith("_ms") else 1.0)
        when = first if row.measure == "ttft" else end
        seen = (when[None, :] <= at[:, None]).astype(np.float64)
    else:
        return
    yield _metric(row, "_count", at, seen.sum(axis=1))
    yield _metric(row, "_sum", at, seen @ values)
    for bound in (*edges, np.inf):
        edge = "+Inf" if np.isinf(bound) else str(float(bound))
        yield _metric(row, "_bucket", at, seen @ (values <= bound), le=edge)


def _metric(row: EngineMetric, suffix: str, at: Floats, values: Any, **more: str) -> dict[str, Any]:
    labels = {label: LABELS.get(label, "0") for label in row.labels}
    told = {"__name__": f"{row.name}{suffix}", **labels, **more}
    pairs = zip(at.tolist(), np.asarray(values, np.float64).tolist(), strict=True)
    return {"metric": told, "values": [[at, repr(value)] for at, value in pairs]}
