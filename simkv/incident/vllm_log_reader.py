"""Read the logs of vLLM: of V0 from 0.2 on, and of V1 up to 0.33.

The formats match the released wheels: ``v1/metrics/loggers.py`` (statistics every 10 s during work,
and iterations since 0.27), ``v1/engine/core.py`` (iterations from 0.14 to 0.26, and the engine's
configuration), ``entrypoints`` (``non-default args``, ``Received request``),
``v1/core/kv_cache_utils.py`` (size of the KV cache), ``config/scheduler.py`` (token budget).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from simkv.core.engine_version import find_version, is_since
from simkv.incident.bounded_table import (
    MAX_LINES,
    MAX_REQUESTS,
    MAX_STEPS,
    AccessCounts,
    BoundedArrivals,
    BoundedTable,
)
from simkv.incident.evidence import (
    STEP_COLUMNS,
    Evidence,
    StatedSetting,
    source_location,
)
from simkv.incident.log_lines import (
    ACCESS,
    LogLine,
    Writers,
    check_settings,
    read_line,
    read_log_lines,
)
from simkv.incident.log_windows import VLLM_INTERVAL_S
from simkv.schedulers.vllm.server_options import CACHE_LINES
from simkv.workload.trace_source import TraceSource

#: Words of the lines that are parsed; most lines of a busy log contain none of them.
LINE_PATTERN = re.compile(
    r"throughput: |Iteration\(|Received request |Aborted request|args: |LLM engine \(v|version |"
    r"KV cache size|num_gpu_blocks|blocks: |max_num_batched_tokens=|Asynchronous scheduling|"
    r"fatal error|EngineDeadError|died unexpectedly|Maximum concurrency|█ +model |POST /|"
    r"block size to|Background loop has errored|Engine background task failed|Error: "
)
_STATS = re.compile(
    r"Avg prompt throughput: (?P<prompt_rate>[\d.]+) tokens/s, "
    r"Avg generation throughput: (?P<output_rate>[\d.]+) tokens/s, (?:[^:]*: ?[\d.]+ ms, ?)*"
    r"Running: (?P<running>\d+) reqs, (?:Swapped: (?P<swapped>\d+) reqs, )?"
    r"(?:Waiting|Pending): (?P<waiting>\d+) reqs(?P<rest>.*)"
)
#: Rank of a line, taken from its prefix or from the name of the engine core process.
_ENGINE = re.compile(r"Engine (\d+): |\(EngineCore_(?:DP)?(\d+) pid=")
#: Source file of the statistics lines up to 0.3; an excerpt with these lines may lack the version.
_OLD_FILE = "llm_engine.py:"
_AGGREGATED = re.compile(r"(\d+) Engines Aggregated: ")
_USAGE = re.compile(r"(?<!CPU )KV cache usage: ([\d.]+)%")
_HITS = re.compile(r"(?<!External )[Pp]refix cache hit rate: (?:GPU: )?([\d.]+)%")
_PREEMPTIONS = re.compile(r"Preemptions: (\d+)")
_STEP = re.compile(
    r"Iteration\(\d+\): (\d+) context requests, (\d+) context tokens, (\d+) generation requests, "
    r"(\d+) generation tokens, iteration elapsed time: ([\d.]+) ms(?P<dummy> \(dummy\))?"
)
_RECEIVED = re.compile(r"Received request (?P<request>[^\s:]+): ")
_MOST = re.compile(r"max_tokens=(\d+)")
_IDS = re.compile(r"prompt_token_ids: \[([\d, ]*)\]")
_ABORTED = re.compile(r"Aborted request\(?s?\)? ([^\s.]+)")
_ARGS = re.compile(r"non-default args: (\{.*\})")
_PLAIN_ARG = re.compile(r"'(\w+)': ('[^']*'|-?[\d.]+(?:e-?\d+)?|True|False|None)")
#: Start of a server: a separate line, or a line beside the logo.
_BEGINS = re.compile(r"server version |█ +version ")
_VERSION = re.compile(
    r"(?:server version |█ +version |LLM engine \(v)v?(\d+\.\d+(?:\.\d+)?[\w.+]*)"
)
_MODEL = re.compile(r"█ +model +(\S+)")
_CONFIG = re.compile(
    r"\b(model|max_seq_len|tensor_parallel_size|data_parallel_size|enable_prefix_caching|"
    r"chunked_prefill_enabled|kv_cache_dtype|quantization)=('[^']*'|[\w.]+)"
)
_BUDGET = re.compile(r"max_num_batched_tokens=(\d+)")
_ASYNC = re.compile(r"Asynchronous scheduling is (enabled|disabled)")
_DIED = re.compile(
    r"encountered a fatal error|EngineDeadError|died unexpectedly|Engine background task failed|"
    r"Background loop has errored"
)
#: Exception at the end of a stack trace, and the maximum number of lines between it and the death.
_EXCEPTION = re.compile(r"(?:^|[\] ])((?!\S*EngineDeadError)(?:\w+\.)*\w+Error: .{1,120})")
MAX_EXCEPTION_LINES = 200
_BLOCK = re.compile(r"Setting (?:kv cache|attention) block size to (\d+)")
_CACHE = [re.compile(line) for line in CACHE_LINES]
#: Flags that have another name in the logged configuration.
_FLAGS = {
    "max_seq_len": "max_model_len",
    "chunked_prefill_enabled": "enable_chunked_prefill",
}


@dataclass
class _Log:
    """Values read since the engine's last start."""

    path: Path
    settings: dict[str, StatedSetting] = field(default_factory=dict)
    series: BoundedTable = field(default_factory=lambda: BoundedTable(MAX_LINES))
    steps: BoundedTable = field(default_factory=lambda: BoundedTable(MAX_STEPS, thinned=True))
    arrivals: BoundedArrivals = field(default_factory=lambda: BoundedArrivals(MAX_REQUESTS))
    access: AccessCounts = field(default_factory=lambda: AccessCounts(MAX_LINES))
    untimed: BoundedTable = field(default_factory=lambda: BoundedTable(MAX_LINES))
    died: str | None = None
    exception: str | None = None
    exception_line: int = 0

    def __post_init__(self) -> None:
        self.writers = Writers(self.path)


def read(source: TraceSource) -> Evidence:
    """Return the evidence in a log since the server's last start.

    Earlier restarts are counted. Raises InputError if the log cannot be read.
    """
    log, notes, starts = _Log(source.path), list[str](), 0
    for line in read_log_lines(source, LINE_PATTERN):
        if _BEGINS.search(line.text) and (log.series or log.arrivals or log.died):
            starts, log = starts + 1, _Log(source.path)
        read_line(_READERS, log, line)
    check_settings(log.settings)
    if starts:
        notes.append(
            f"{source.path.name}: the server was started {starts + 1} times; only lines after its "
            "last start are read"
        )
    wall = bool(log.series) or not log.untimed
    if log.untimed:
        used = "are ignored" if wall else f"are assumed to be {VLLM_INTERVAL_S:.0f} s apart"
        notes.append(
            f"{source.path.name}: {log.untimed.seen} statistics lines without a time {used}"
        )
    more = [
        *log.series.note("lines on the server"),
        *log.steps.note("iterations"),
        *log.arrivals.note(),
    ]
    notes += [f"{source.path.name}: {line}" for line in more]
    series = log.series.frame() if wall else log.untimed.frame()
    if missing := _gaps(series):
        notes.append(
            f"{source.path.name}: {missing} gaps between its statistics lines while requests ran; "
            "the load in these gaps is unknown"
        )
    return Evidence(
        source.path.name,
        engine="vllm",
        wall=wall,
        settings=log.settings,
        series=series,
        steps=log.steps.frame(),
        arrivals=log.arrivals.frame(),
        access=log.access.frame(),
        died=log.died and (f"{log.exception}, {log.died}" if log.exception else log.died),
        notes=tuple(notes),
        lacks=_lacks(log),
    )


def _gaps(series: pd.DataFrame | None) -> int:
    """Return the number of gaps between lines during which requests were running."""
    found = 0
    if series is None:
        return found
    for _, lines in series.groupby("engine"):
        gaps, ran = lines["t_s"].diff(), lines["running"].shift() > 0
        found += int(((gaps > 3 * gaps.median()) & ran).sum())
    return found


def _lacks(log: _Log) -> tuple[str, ...]:
    found = ["lengths and times of single requests (add spans or a client's results)"]
    if not log.steps:
        found.append("step durations (add --enable-logging-iteration-details)")
    return tuple(found)


def _stats(log: _Log, line: LogLine) -> bool:
    match = _STATS.search(line.text)
    if not match:
        return False
    rest = match["rest"]
    if _OLD_FILE in line.text[: match.start()] and "version" not in log.settings:
        where = source_location(log.path, line.number)
        log.settings["version"] = StatedSetting("0.3", where)
    log.writers.check(line, _rank(line.text))
    table = log.untimed if line.at is None else log.series
    if line.at is not None:
        log.access.close(line.at)
    several = _AGGREGATED.search(line.text)
    row = {
        "t_s": VLLM_INTERVAL_S * len(table) if line.at is None else line.at,
        "engine": -int(several[1]) if several else _rank(line.text),
        "running": int(match["running"]),
        "waiting": int(match["waiting"]) + int(match["swapped"] or 0),
        "usage": _share(_USAGE, rest),
        "prompt_rate": float(match["prompt_rate"]),
        "output_rate": float(match["output_rate"]),
        "hit_rate": _share(_HITS, rest),
        "preemptions": int(taken[1]) if (taken := _PREEMPTIONS.search(rest)) else 0,
    }
    table.append(row)
    return True


def _access(log: _Log, line: LogLine) -> bool:
    match = ACCESS.search(line.text)
    if not match:
        return False
    log.access.add(int(match["status"]), line.at, line.timed)
    return True


def _rank(text: str) -> int:
    match = _ENGINE.search(text)
    return int(match[1] or match[2]) if match else 0


def _share(pattern: re.Pattern[str], text: str) -> float:
    match = pattern.search(text)
    return float(match[1]) / 100 if match else float("nan")


def _step(log: _Log, line: LogLine) -> bool:
    match = _STEP.search(line.text)
    if not match:
        return False
    if match["dummy"] or line.at is None:
        return True
    counts = [float(match[index]) for index in range(1, 5)]
    values = (
        line.at,
        float(_rank(line.text)),
        *counts,
        float(match[5]) / 1e3,
        _share(_USAGE, line.text),
    )
    log.steps.append(dict(zip(STEP_COLUMNS, values, strict=True)))
    return True


def _received(log: _Log, line: LogLine) -> bool:
    match = _RECEIVED.search(line.text)
    if not match or line.at is None:
        return False
    most, ids = _MOST.search(line.text), _IDS.search(line.text)
    prompt = ids[1].count(",") + 1 if ids and ids[1].strip() else 0
    log.arrivals.came(match["request"], line.at, int(most[1]) if most else 0, prompt)
    return True


def _aborted(log: _Log, line: LogLine) -> bool:
    match = _ABORTED.search(line.text)
    if not match or line.at is None:
        return False
    for name in match[1].split(","):
        log.arrivals.add_abort(name, line.at)
    return True


def _args(log: _Log, line: LogLine) -> bool:
    match = _ARGS.search(line.text)
    if not match:
        return False
    told = source_location(log.path, line.number)
    for name, value in _literal(match[1]).items():
        log.settings[name] = StatedSetting(value, told)
    return True


def _literal(text: str) -> Mapping[str, Any]:
    """Parse a printed dictionary without values that are not literals."""
    try:
        found = ast.literal_eval(text)
        if isinstance(found, dict):
            return found
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        pass
    found = {}
    for name, value in _PLAIN_ARG.findall(_without_nested(text)):
        found[name] = ast.literal_eval(value)
    return found


def _without_nested(text: str) -> str:
    """Remove values that are dictionaries, such as ``compilation_config``."""
    depth, kept = 0, []
    for character in text:
        depth += (character == "{") - (character == "}")
        if depth == 1 and character not in "{}":
            kept.append(character)
    return "".join(kept)


def _version(log: _Log, line: LogLine) -> bool:
    match, told = _VERSION.search(line.text), source_location(log.path, line.number)
    if model := _MODEL.search(line.text):
        log.settings.setdefault("model", StatedSetting(model[1], told))
    if not match:
        return False
    log.settings["version"] = StatedSetting(match[1], told)
    if "LLM engine (v" in line.text:
        for name, value in _CONFIG.findall(line.text):
            flag = _FLAGS.get(name, name)
            if flag not in log.settings:
                log.settings[flag] = StatedSetting(_value(value), told)
    return True


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _cache(log: _Log, line: LogLine) -> bool:
    for pattern in _CACHE:
        if match := pattern.search(line.text):
            for name, value in match.groupdict().items():
                told = StatedSetting(
                    int(value.replace(",", "")), source_location(log.path, line.number)
                )
                log.settings[{"blocks": "num_gpu_blocks", "tokens": "kv_tokens"}[name]] = told
            return True
    return False


def _scheduling(log: _Log, line: LogLine) -> bool:
    told = source_location(log.path, line.number)
    if match := _BLOCK.search(line.text):
        log.settings["block_size"] = StatedSetting(int(match[1]), told)
    elif match := _BUDGET.search(line.text):
        log.settings.setdefault("max_num_batched_tokens", StatedSetting(int(match[1]), told))
    elif match := _ASYNC.search(line.text):
        log.settings["async_scheduling"] = StatedSetting(match[1] == "enabled", told)
    return True


def _died(log: _Log, line: LogLine) -> bool:
    """Note the line in which the engine died, and the exception that is next to it."""
    if log.died is None and line.number - log.exception_line > MAX_EXCEPTION_LINES:
        log.exception = None  # the engine continued after this exception
    wanted = log.died is None or log.exception is None
    if wanted and "Error: " in line.text and (match := _EXCEPTION.search(line.text)):
        log.exception, log.exception_line = match[1].strip(), line.number
    if not _DIED.search(line.text):
        return False
    log.died = log.died or source_location(log.path, line.number)
    return True


#: Each reader returns whether it recognized the line; the most frequent lines come first.
_READERS: tuple[Callable[[_Log, LogLine], bool], ...] = (
    _step,
    _stats,
    _access,
    _received,
    _aborted,
    _args,
    _version,
    _died,
    _cache,
    _scheduling,
)


#: The engine whose log this module reads, and its name in messages.
ENGINE, TITLE = "vllm", "vLLM"
#: Whether ``steps`` are single iterations with their durations.
LOGS_ITERATIONS = True
#: Flags of the server that log or export single requests.
REQUEST_FLAGS: str | None = "--otlp-traces-endpoint"
#: Oldest release that can be simulated.
OLDEST: str | None = "0.5"
#: Setting that limits running requests.
SLOT_SETTING = "max_num_seqs"


def computed_only(version: str) -> bool:
    """Return whether the prompt token counts in the log lines of a version exclude cached
    tokens.
    """
    return find_version(version) is not None and is_since(version, "0.16")


#: Lines that only this engine writes.
OWN_LINE = re.compile(r"Avg prompt throughput: |Iteration\(\d|non-default args: |LLM engine \(v")


def known(text: str) -> bool:
    """Return whether a text contains lines of vLLM."""
    words = ("vllm", "vLLM", "Avg prompt throughput: ", "Iteration(", "Received request ")
    return any(word in text for word in words) and bool(LINE_PATTERN.search(text))
