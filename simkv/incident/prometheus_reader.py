"""Read metrics of vLLM or SGLang from Prometheus: ``query_range`` JSON, or scrapes as text.

A JSON file contains one response of ``/api/v1/query_range``, a list of responses, or one response
per line. A text file contains concatenated outputs of ``/metrics``. In a text file, either each
sample has a timestamp (ms, as in the text format), or each scrape follows a line ``# scraped TIME``
(s since 1970, or ISO 8601). A single scrape without a time gets the modification time of the file.
A counter that decreases was reset, and its new value counts as an increase. The values of several
engines or models are summed. Metric names are recognized with and without the suffix ``_total``.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from simkv.core.errors import InputError
from simkv.incident.evidence import SERIES_COLUMNS, Evidence, StatedSetting
from simkv.workload.column_values import MAX_SHOWN_CHARACTERS
from simkv.workload.trace_source import TraceSource

Floats = npt.NDArray[np.float64]
#: Metrics that are read, with their names in the engines.
GAUGES: dict[str, tuple[str, ...]] = {
    "running": ("vllm:num_requests_running", "sglang:num_running_reqs"),
    "waiting": ("vllm:num_requests_waiting", "sglang:num_queue_reqs"),
    "usage": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage"),
}
COUNTERS: dict[str, tuple[str, ...]] = {
    "prompt": ("vllm:prompt_tokens", "sglang:prompt_tokens"),
    "output": ("vllm:generation_tokens", "sglang:generation_tokens"),
    "preemptions": ("vllm:num_preemptions", "sglang:num_retracted_requests"),
    "queries": (
        "vllm:prefix_cache_queries",
        "vllm:gpu_prefix_cache_queries",
        "sglang:prompt_tokens",
    ),
    "hits": ("vllm:prefix_cache_hits", "vllm:gpu_prefix_cache_hits", "sglang:cached_tokens"),
}
HISTOGRAMS: dict[str, tuple[str, ...]] = {
    "prompt_tokens": ("vllm:request_prompt_tokens", "sglang:prompt_tokens_histogram"),
    "output_tokens": ("vllm:request_generation_tokens", "sglang:generation_tokens_histogram"),
    "ttft": ("vllm:time_to_first_token_seconds", "sglang:time_to_first_token_seconds"),
    "e2e": ("vllm:e2e_request_latency_seconds", "sglang:e2e_request_latency_seconds"),
    "queue": ("vllm:request_queue_time_seconds", "sglang:queue_time_seconds"),
    "prefill": ("vllm:request_prefill_time_seconds",),
    "itl": (
        "vllm:inter_token_latency_seconds",
        "vllm:time_per_output_token_seconds",
        "sglang:inter_token_latency_seconds",
    ),
}
_INFO = ("vllm:cache_config_info", "sglang:cache_config_info")
_SIZES = ("max_total_num_tokens", "page_size")
_SAMPLE = re.compile(
    r"(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>.*)\})?\s+(?P<value>\S+)(?:\s+(?P<time>-?\d+))?\s*$"
)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_SCRAPED = re.compile(r"#\s*(?:scraped|time):?\s+(\S+)")

#: Values by metric name, then by label set, each with their times.
Samples = dict[str, dict[tuple[tuple[str, str], ...], list[tuple[float, float]]]]


def read_metrics(source: TraceSource, *others: TraceSource) -> Evidence:
    """Return the evidence in one or more metrics files of one server.

    Raises InputError if a file cannot be read, or if there is only one scrape in total.
    """
    samples: Samples = defaultdict(lambda: defaultdict(list))
    for one in (source, *others):
        with one.text() as lines:
            text = lines.read()
        is_json = text.lstrip()[:1] in ("{", "[")
        found = _of_json(one, text) if is_json else _of_text(one, text, single=bool(others))
        for name, labels, at, value in found:
            samples[name][tuple(sorted(labels.items()))].append((at, value))
    for sets in samples.values():
        for values in sets.values():
            values.sort()
    times = sorted(
        {at for sets in samples.values() for values in sets.values() for at, _ in values}
    )
    if len(times) < 2:
        raise InputError(
            f"{source.path}: found {len(times)} scrapes of vLLM or SGLang with times; expected at "
            "least 2: give timestamps, a line '# scraped TIME' before each scrape, or one file per "
            "scrape"
        )
    grid = np.array(times)
    histograms = _increments(samples, grid)
    notes = [f"{source.path.name}: {n} counters were reset" for n in [_resets(samples)] if n]
    gaps = np.diff(grid)
    if (missing := int((gaps > 3 * np.median(gaps)).sum())) > 0:
        notes.append(
            f"{source.path.name}: {missing} gaps between scrapes; their load is spread evenly"
        )
    return Evidence(
        source.path.name,
        engine="sglang" if any(name.startswith("sglang:") for name in samples) else "vllm",
        settings=_settings(samples, source.path.name),
        series=_series(samples, grid, histograms),
        histograms=histograms,
        notes=tuple(notes),
        lacks=("single requests: simkv samples requests that agree with the metrics",),
    )


def _of_json(source: TraceSource, text: str) -> Iterator[tuple[str, dict[str, str], float, float]]:
    try:
        documents = [json.loads(text)]
    except (ValueError, RecursionError):
        try:
            documents = [json.loads(line) for line in text.splitlines() if line.strip()]
        except (ValueError, RecursionError) as error:
            raise source.error(
                f"should be JSON; found {str(error)[:MAX_SHOWN_CHARACTERS]}"
            ) from error
    for document in documents:
        for answer in document if isinstance(document, list) else [document]:
            data = answer.get("data") if isinstance(answer, dict) else None
            results = data.get("result") if isinstance(data, dict) else None
            for series in results if isinstance(results, list) else ():
                labels = dict(series.get("metric") or {})
                name = str(labels.pop("__name__", ""))
                instant = [series["value"]] if series.get("value") else ()
                for at, value in series.get("values") or instant:
                    if name and np.isfinite(number := _number(value)):
                        yield name, labels, float(at), number


def _of_text(
    source: TraceSource, text: str, *, single: bool
) -> Iterator[tuple[str, dict[str, str], float, float]]:
    """Yield the name, labels, time (s) and value of each sample.

    A ``single`` scrape in the file needs no time.
    """
    several = not single or any(_SCRAPED.match(row) for row in text.splitlines())
    scraped = None if several else source.path.stat().st_mtime
    counted: set[tuple[str, str]] = set()
    for line, row in enumerate(text.splitlines(), start=1):
        if match := _SCRAPED.match(row):
            scraped = _when(source, line, match[1])
        elif row.startswith(("vllm:", "sglang:")) and (found := _SAMPLE.match(row)):
            at = float(found["time"]) / 1e3 if found["time"] else scraped
            if not found["time"] and not several:
                at = None if (key := (found["name"], found["labels"] or "")) in counted else at
                counted.add(key)
            if at is None:
                raise source.error(
                    "the time of this scrape is missing; expected a timestamp after the value, "
                    "or a line '# scraped TIME' before it",
                    line,
                )
            labels = dict(_LABEL.findall(found["labels"] or ""))
            if np.isfinite(number := _number(found["value"])):
                yield found["name"], labels, at, number


def _when(source: TraceSource, line: int, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        pass
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise source.error(f"should be a time; found {text[:MAX_SHOWN_CHARACTERS]}", line) from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        return float("nan")


def _named(samples: Samples, names: tuple[str, ...], end: str = "") -> str | None:
    """Return the first of ``names`` with samples, or None.

    Names are recognized with and without the suffix ``_total``.
    """
    for name in names:
        for whole in (f"{name}{end}", f"{name}{end}_total"):
            if whole in samples:
                return whole
    return None


def _increase(values: list[tuple[float, float]], grid: Floats) -> Floats:
    """Return the increase of a counter between successive times of ``grid``. The first value is
    0.
    """
    found = np.zeros(len(grid))
    for (_, before), (at, value) in pairwise(values):
        found[np.searchsorted(grid, at)] += value - before if value >= before else value
    return found


def _resets(samples: Samples) -> int:
    """Return the number of counter resets, over all counters that simkv uses."""
    names = [_named(samples, names) for names in COUNTERS.values()]
    return sum(
        any(later < earlier for (_, earlier), (_, later) in pairwise(values))
        for name in names
        if name
        for values in samples[name].values()
    )


def _summed(samples: Samples, name: str | None, grid: Floats) -> Floats:
    sets = samples[name] if name else {}
    return sum((_increase(values, grid) for values in sets.values()), np.zeros(len(grid)))


def _increments(samples: Samples, grid: Floats) -> dict[str, Any]:
    """Return the increases between successive times of ``grid``, by name of the metric.

    For a histogram, the values are the increases of its count, its sum and its buckets.
    """
    found: dict[str, Any] = {"t_s": grid.tolist()}
    for key, names in COUNTERS.items():
        if name := _named(samples, names):
            found[key] = _summed(samples, name, grid).tolist()
    for key, names in HISTOGRAMS.items():
        count = _named(samples, names, "_count")
        if count is None:
            continue
        edges: dict[float, Floats] = {}
        for labels, values in samples.get(_named(samples, names, "_bucket") or "", {}).items():
            edge = _number(dict(labels).get("le"))
            if not np.isnan(edge):
                edges[edge] = edges.get(edge, np.zeros(len(grid))) + _increase(values, grid)
        found[key] = {
            "count": _summed(samples, count, grid).tolist(),
            "sum": _summed(samples, _named(samples, names, "_sum"), grid).tolist(),
            "le": [edge if np.isfinite(edge) else None for edge in sorted(edges)],
            "below": [edges[edge].tolist() for edge in sorted(edges)],
        }
    return found


def _series(samples: Samples, grid: Floats, rose: dict[str, Any]) -> pd.DataFrame:
    table: dict[str, Any] = {"t_s": grid, "engine": 0}
    for key, names in GAUGES.items():
        name = _named(samples, names)
        sets = list(samples[name].values()) if name else []
        columns = [_held(values, grid) for values in sets]
        whole = np.nansum(columns, axis=0) if columns else np.full(len(grid), np.nan)
        table[key] = whole / len(columns) if key == "usage" and columns else whole
    spans = np.diff(grid, prepend=grid[0])
    with np.errstate(invalid="ignore", divide="ignore"):
        for key, column in (("prompt", "prompt_rate"), ("output", "output_rate")):
            table[column] = np.array(rose.get(key, np.full(len(grid), np.nan))) / spans
        asked, hits = (np.cumsum(rose.get(key, np.zeros(len(grid)))) for key in ("queries", "hits"))
        table["hit_rate"] = np.where(asked > 0, hits / asked, np.nan)
    table["preemptions"] = np.array(rose.get("preemptions", np.zeros(len(grid))))
    found = pd.DataFrame(table)[list(SERIES_COLUMNS)]
    return found.dropna(subset=["running", "waiting"]).reset_index(drop=True)


def _held(values: list[tuple[float, float]], grid: Floats) -> Floats:
    """Return the last known value of a gauge at each time, or NaN before its first sample."""
    at, seen = np.array(values).T
    place = np.searchsorted(at, grid, "right") - 1
    return np.where(place >= 0, seen[np.maximum(place, 0)], np.nan)


def _settings(samples: Samples, source: str) -> dict[str, StatedSetting]:
    """Return the settings in the labels of ``cache_config_info`` and in the gauges of SGLang."""
    found = {}
    for name in _INFO:
        for labels in samples.get(name, {}):
            told = dict(labels)
            for key in ("block_size", "num_gpu_blocks", "page_size"):
                if told.get(key, "").isdigit():
                    found[key] = StatedSetting(int(told[key]), source)
    for key in _SIZES:
        for values in samples.get(f"sglang:{key}", {}).values():
            found[key] = StatedSetting(int(values[-1][1]), source)
    return found


def is_metrics(text: str) -> bool:
    """Return whether a text contains metrics of vLLM or SGLang."""
    names = ("vllm:num_requests_running", "vllm:e2e_request", "sglang:num_running_reqs")
    return any(name in text for name in names) or (
        '"resultType"' in text and ("vllm:" in text or "sglang:" in text)
    )
