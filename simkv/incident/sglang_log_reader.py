"""Read SGLang's log: start-up lines, batch lines and logged requests.

The formats match 0.5.23 (``managers/scheduler_components/metrics_reporter.py``,
``utils/request_logger.py``). Older versions lack some fields, so each field is searched separately.
With ``--log-requests --log-requests-format json``, SGLang writes ``request.received``, with the
prompt from level 2 on, and ``request.finished``, with the lengths and times of each request.
"""

from __future__ import annotations

import ast
import json
import re
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from simkv.incident.bounded_table import (
    MAX_LINES,
    MAX_REQUESTS,
    MAX_STEPS,
    AccessCounts,
    BoundedArrivals,
    BoundedTable,
)
from simkv.incident.evidence import Evidence, StatedSetting, source_location
from simkv.incident.log_lines import (
    ACCESS,
    LogLine,
    Writers,
    check_settings,
    read_line,
    read_log_lines,
)
from simkv.workload.trace_source import TraceSource

LINE_PATTERN = re.compile(
    r"Prefill batch|Decode batch|server_args=|max_total_num_tokens=|\"event\": ?\"request\.|"
    r"out of memory|Scheduler hit an exception|Abort request|#tokens: |POST /|GET /health|"
    r"Watchdog timeout"
)
#: Marker of the request logger, which can also write to separate files (``--log-requests-target``).
EVENT = '"event": "request.'
#: Assumed time between two lines without a time (s), which is 40 decode steps.
UNTIMED_INTERVAL_S = 2.0
#: Number of prefill batches over which the prefix hit rate is averaged.
HIT_RATE_BATCHES = 100
#: Minimum time after the last batch line for a hang (s).
MIN_HANG_S = 30.0
_COUNTS = {
    "running": re.compile(r"#running-req: (\d+)"),
    "waiting": re.compile(r"#queue-req: (\d+)"),
    "new": re.compile(r"#new-seq: (\d+)"),
    "tokens": re.compile(r"#new-token: (\d+)"),
    "cached": re.compile(r"#cached-token: (\d+)"),
    "usage": re.compile(r"(?<!swa )token usage: ([\d.]+)"),
    "rate": re.compile(r"(?:gen|input) throughput \(token/s\): ([\d.]+)"),
}
_RANK = re.compile(r"\bDP(\d+)\b")
_ARG = re.compile(
    r"['\"]?\b(\w+)['\"]?\s*[=:]\s*('[^']*'|\"[^\"]*\"|-?[\d.]+(?:e-?\d+)?|True|False)"
)
_SIZE = re.compile(
    r"(max_total_num_tokens|chunked_prefill_size|max_prefill_tokens|"
    r"max_running_requests|context_len)=(-?\d+)"
)
_ALARM = re.compile(r"Watchdog timeout|GET /health\S* HTTP/[\d.]+\" 5\d\d")
_DIED = re.compile(r"Prefill out of memory|Decode out of memory|Scheduler hit an exception")


@dataclass
class _Log:
    path: Path
    settings: dict[str, StatedSetting] = field(default_factory=dict)
    series: BoundedTable = field(default_factory=lambda: BoundedTable(MAX_LINES))
    steps: BoundedTable = field(default_factory=lambda: BoundedTable(MAX_STEPS, thinned=True))
    arrivals: BoundedArrivals = field(default_factory=lambda: BoundedArrivals(MAX_REQUESTS))
    access: AccessCounts = field(default_factory=lambda: AccessCounts(MAX_LINES))
    untimed: BoundedTable = field(default_factory=lambda: BoundedTable(MAX_LINES))
    finished: BoundedTable = field(default_factory=lambda: BoundedTable(MAX_REQUESTS))
    died: str | None = None
    prefilled: bool = False
    cut: dict[int, int] = field(default_factory=dict)
    hits: deque[tuple[float, float]] = field(
        default_factory=lambda: deque[tuple[float, float]](maxlen=HIT_RATE_BATCHES)
    )
    last: dict[str, Any] | None = None
    last_at: float | None = None
    alarm: bool = False

    def __post_init__(self) -> None:
        self.writers = Writers(self.path)


def read(source: TraceSource) -> Evidence:
    """Return the evidence in a log since the server's last start."""
    log, starts = _Log(source.path), 0
    for line in read_log_lines(source, LINE_PATTERN):
        log.last_at = log.last_at if line.at is None else line.at
        if "server_args=" in line.text and (log.series or log.finished):
            starts, log = starts + 1, _Log(source.path)
        read_line(_READERS, log, line)
    check_settings(log.settings)
    hang = _append_hang(log)
    notes = [
        *hang,
        *log.series.note("lines on the server"),
        *log.arrivals.note(),
        *log.finished.note("requests that finished"),
    ]
    wall = bool(log.series) or not log.untimed
    if log.untimed:
        used = "are ignored" if wall else f"are assumed to be {UNTIMED_INTERVAL_S:.0f} s apart"
        notes.append(f"{log.untimed.seen} batch lines without a time {used}")
    if starts:
        notes.append(
            f"the server was started {starts + 1} times; only lines after its last start are read"
        )
    lacks = [] if log.finished else ["times of single requests (add --log-requests)"]
    return Evidence(
        source.path.name,
        engine="sglang",
        wall=wall,
        settings=log.settings,
        series=log.series.frame() if wall else log.untimed.frame(),
        steps=log.steps.frame(),
        requests=_requests(log.finished),
        arrivals=log.arrivals.frame(),
        access=log.access.frame(),
        died=log.died,
        notes=tuple(f"{source.path.name}: {note}" for note in notes),
        lacks=tuple(lacks),
    )


def _append_hang(log: _Log) -> list[str]:
    """If the log ends with a hang, add two lines without computed tokens, and return a note.

    A server that computes writes a batch line at least every 40 decode steps. The last line before
    an idle period has running requests too. Therefore only a queue, a watchdog's message or failed
    health checks show that requests remain.
    """
    last, end = log.last, log.last_at
    if last is None or end is None or not log.series or end - last["t_s"] < MIN_HANG_S:
        return []
    alarm = log.alarm and last["running"] > 0
    if not (alarm or last["waiting"] > 0):
        return []
    for at in (last["t_s"] + 1e-3, end):
        none = {"prompt_rate": 0.0, "output_rate": 0.0, "prefills": 0.0, "prompts": 0.0}
        log.series.append({**last, **none, "t_s": at})
    return [f"no batch line in the last {end - last['t_s']:.0f} s, although requests were present"]


def _requests(finished: BoundedTable) -> pd.DataFrame | None:
    table = finished.frame()
    if table is None:
        return None
    return table.sort_values("t_s", kind="stable", ignore_index=True)


def _batch(log: _Log, line: LogLine) -> bool:
    prefill = "Prefill batch" in line.text
    if not prefill and "Decode batch" not in line.text:
        return False
    table = log.untimed if line.at is None else log.series
    if line.at is not None:
        log.access.close(line.at)
    found = {name: _number(pattern, line.text) for name, pattern in _COUNTS.items()}
    rank = _RANK.search(line.text[:80])
    engine = int(rank[1]) if rank else 0
    log.writers.check(line, engine)
    new = found["new"] if prefill else 0.0
    begun, prompts = _begun(log, engine, found) if prefill else (np.nan, np.nan)
    hits, asked = (sum(column) for column in zip(*log.hits, strict=True)) if log.hits else (0, 0)
    log.last = {
        "t_s": UNTIMED_INTERVAL_S * len(table) if line.at is None else line.at,
        "engine": engine,
        "running": found["running"] + (new if new == new else 0.0),
        "waiting": found["waiting"],
        "usage": found["usage"],
        "prompt_rate": found["rate"] if prefill else np.nan,
        "output_rate": np.nan if prefill else found["rate"],
        "hit_rate": hits / asked if asked else np.nan,
        "preemptions": 0,
        "prefills": begun,
        "prompts": prompts,
    }
    log.alarm = False
    table.append(log.last)
    step = _of_prefill(log, found) if prefill else _of_decodes(found)
    if step is not None and line.at is not None:
        row = {"t_s": line.at, "engine": engine, **step, "usage": found["usage"]}
        log.steps.append(row)
    log.prefilled = prefill
    return True


def _begun(log: _Log, engine: int, found: dict[str, float]) -> tuple[float, float]:
    """Return the number of prefills that begin in a batch, and of their prompt tokens, with cached
    ones.

    If the previous batch was cut at the limit, its last prefill continues.
    """
    most = log.settings.get("chunked_prefill_size")
    tokens, cached = found["tokens"], float(np.nan_to_num(found["cached"]))
    begun = max(found["new"] - log.cut.get(engine, 0), 0.0)
    log.cut[engine] = int(most is not None and 0 < most.value <= tokens)
    log.hits.append((cached, cached + tokens))
    return begun, tokens + cached


def _of_decodes(found: dict[str, float]) -> dict[str, float] | None:
    """Return the mean decode step since the previous line of decode batches."""
    running, rate = found["running"], found["rate"]
    if not (running > 0 and rate > 0):
        return None
    none = {"prefill_seqs": 0.0, "prefill_tokens": 0.0}
    return {**none, "decode_seqs": running, "decode_tokens": running, "seconds": running / rate}


def _of_prefill(log: _Log, found: dict[str, float]) -> dict[str, float] | None:
    """Return the step of a prefill batch that directly follows another prefill batch, or None.

    Only then does the logged throughput cover exactly one step.
    """
    tokens, rate = found["tokens"], found["rate"]
    if not (log.prefilled and tokens > 0 and rate > 0):
        return None
    mixed = log.settings.get("enable_mixed_chunk")
    beside = found["running"] if mixed is not None and mixed.value else 0.0
    return {
        "prefill_seqs": max(found["new"], 1.0),
        "prefill_tokens": tokens,
        "decode_seqs": beside,
        "decode_tokens": beside,
        "seconds": tokens / rate,
    }


def _number(pattern: re.Pattern[str], text: str) -> float:
    match = pattern.search(text)
    return float(match[1]) if match else float("nan")


def _request(log: _Log, line: LogLine) -> bool:
    start = line.text.find('{"timestamp"')
    if start < 0:
        return False
    try:
        told = json.loads(line.text[start:])
    except ValueError:
        return True  # incomplete line
    name, asked = str(told.get("rid")), told.get("obj") or {}
    params = asked.get("sampling_params") or {}
    most = params.get("max_new_tokens") if isinstance(params, dict) else None
    if told.get("event") == "request.received" and line.at is not None:
        ids = asked.get("input_ids")
        prompt = len(ids) if isinstance(ids, list) else 0
        log.arrivals.came(name, line.at, int(most or 0), prompt)
    elif told.get("event") == "request.finished":
        _finished(log, name, int(most or 0), (told.get("out") or {}).get("meta_info") or {}, line)
    return True


def _finished(log: _Log, name: str, most: int, about: dict[str, Any], line: LogLine) -> None:
    e2e = _time(about, "e2e_latency")
    start = _time(about, "request_received_ts")
    if start != start:
        start = (line.at or 0.0) - e2e
    reason = about.get("finish_reason") or {}
    if isinstance(reason, dict) and reason.get("type") == "abort":
        log.arrivals.add_abort(name, line.at or 0.0)
        return
    first, output = _time(about, "first_token_latency"), int(about.get("completion_tokens") or 0)
    queue = _time(about, "queue_time")
    log.finished.append(
        {
            "request": name,
            "t_s": start,
            "start_s": start,
            "prompt_tokens": int(about.get("prompt_tokens") or 0),
            "output_tokens": output,
            "max_tokens": most,
            "cached_tokens": int(about.get("cached_tokens") or 0),
            "queue_ms": 1e3 * queue,
            "prefill_ms": 1e3 * (first - queue),
            "ttft_ms": 1e3 * first,
            "tpot_ms": 1e3 * (e2e - first) / (output - 1) if output > 1 else np.nan,
            "e2e_ms": 1e3 * e2e,
        }
    )


def _time(about: dict[str, Any], name: str) -> float:
    value = about.get(name)
    return float(value) if isinstance(value, int | float) else float("nan")


def _start(log: _Log, line: LogLine) -> bool:
    told = source_location(log.path, line.number)
    if "server_args=" in line.text:
        for name, value in _ARG.findall(line.text.partition("server_args=")[2]):
            log.settings[name] = StatedSetting(ast.literal_eval(value), told)
        return True
    found = _SIZE.findall(line.text)
    for name, value in found:
        log.settings[name] = StatedSetting(int(value), told)
    return bool(found)


def _died(log: _Log, line: LogLine) -> bool:
    if not _DIED.search(line.text):
        return False
    log.died = log.died or source_location(log.path, line.number)
    return True


def _health(log: _Log, line: LogLine) -> bool:
    """Note a message of the watchdog or a failed health check."""
    if _ALARM.search(line.text):
        log.alarm = True
        return True
    return "GET /health" in line.text


def _access(log: _Log, line: LogLine) -> bool:
    match = ACCESS.search(line.text)
    if not match:
        return False
    log.access.add(int(match["status"]), line.at, line.timed)
    return True


_READERS: tuple[Callable[[_Log, LogLine], bool], ...] = (
    _batch,
    _health,
    _access,
    _request,
    _start,
    _died,
)


#: The engine whose log this module reads, and the name of the engine in messages.
ENGINE, TITLE = "sglang", "SGLang"
#: Whether ``steps`` are single iterations with their durations.
LOGS_ITERATIONS = False
#: Flags of the server that log or export single requests.
REQUEST_FLAGS: str | None = "--log-requests --log-requests-format json"
#: Oldest release that can be simulated.
OLDEST: str | None = None
#: Setting that limits running requests.
SLOT_SETTING = "max_running_requests"


def computed_only(version: str) -> bool:  # noqa: ARG001
    """Return whether the prompt token counts in the log lines of a version exclude cached
    tokens.
    """
    return False


#: Lines that only this engine writes; the last pattern matches the request logger, plain or in
#: JSON.
OWN_LINE = re.compile(r"(Prefill|Decode) batch[,.] ?#|server_args=|event\\*\": ?\\*\"request\.")


def known(text: str) -> bool:
    """Return whether a text contains lines of SGLang."""
    words = ("Prefill batch", "Decode batch", "server_args=", "sglang", EVENT)
    return any(word in text for word in words) and bool(LINE_PATTERN.search(text))
