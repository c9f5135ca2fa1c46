"""Write a run as a log of vLLM, in the format of the simulated release.

The log contains the start-up lines, a statistics line every 10 s and optionally access lines, lines
of requests (``--enable-log-requests``) and of iterations (``--enable-logging-iteration-details``,
from 0.14 on). The formats match the releases from 0.11 to 0.33 (``v1/metrics/loggers.py``,
``v1/engine/core.py``, ``entrypoints``). ``tests/incident/test_stats_line_formats.py`` compares them
with lines of these releases.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

from simkv.core.engine_flags import flags
from simkv.core.engine_version import is_since
from simkv.core.outcome import Outcome
from simkv.incident.emit.log_dates import format_time
from simkv.incident.emit.otel_writer import request_name
from simkv.incident.vllm_log_reader import computed_only
from simkv.schedulers.vllm.config import VllmConfig
from simkv.sim.run_record import RunRecord

#: Seconds between two statistics lines (``VLLM_LOG_STATS_INTERVAL``), and seconds until the engine
#: is ready.
STATS_INTERVAL_S, STARTUP_S = 10.0, 60.0
#: Number of requests that the reported prefix-cache hit rate covers.
HIT_RATE_REQUESTS = 1000
#: The process that writes most lines.
SERVER = "APIServer pid=1"


@dataclass(frozen=True)
class LogOptions:
    """Optional lines of the log."""

    requests: bool = False
    iterations: bool = False
    access: bool = False


#: Time (s), text and process of a line; the process is the server's process or the process of a
#: rank.
LogEntry = tuple[float, str, str]


def vllm_log_lines(
    ranks: Sequence[RunRecord], config: VllmConfig, wanted: LogOptions | None = None
) -> Iterator[str]:
    """Yield the log lines of a vLLM server in order of time."""
    wanted = wanted or LogOptions()
    version = config.variant
    lines = [(at, text, SERVER) for at, text in _start(config, version, wanted, len(ranks))]
    for rank, record in enumerate(ranks):
        lines += _stats(record, version, rank)
        if wanted.requests:
            lines += _requests(record, version)
        if wanted.access:
            lines += _access(record)
        if wanted.iterations and is_since(version, "0.14"):
            process = f"EngineCore_DP{rank} pid={90 + rank}" if len(ranks) > 1 else SERVER
            lines += _iterations(record, version, rank, process)
    for at, text, process in sorted(lines, key=lambda line: line[0]):
        whose = f"({process}) " if is_since(version, "0.11") else ""
        prefix = whose if text.startswith("INFO: ") else _prefix(at, version, process)
        yield prefix + text


def _access(record: RunRecord) -> Iterator[LogEntry]:
    """Yield uvicorn's access line of each streamed request, which has no time."""
    for life in record.requests.values():
        port = 32768 + life.request.id % 28000
        text = f'INFO:     127.0.0.1:{port} - "POST /v1/completions HTTP/1.1" 200 OK'
        yield life.request.arrival, text, SERVER


def _prefix(at: float, version: str, process: str) -> str:
    whose = f"({process}) " if is_since(version, "0.11") else ""
    return f"{whose}INFO {format_time(at, '%m-%d %H:%M:%S')} "


def _start(
    config: VllmConfig, version: str, wanted: LogOptions, ranks: int
) -> Iterator[tuple[float, str]]:
    version = config.variant.partition("-")[0]
    if is_since(version, "0.19"):
        yield -STARTUP_S, f"[utils.py:302] vLLM server version {version}, serving model simulated"
    else:
        yield -STARTUP_S, f"[api_server.py:1839] vLLM API server version {version}"
    yield -STARTUP_S, f"[utils.py:233] non-default args: {_args(config, wanted, ranks)!r}"
    budget = config.max_num_batched_tokens
    yield (
        -STARTUP_S + 1,
        f"[scheduler.py:239] Chunked prefill is enabled with max_num_batched_tokens={budget}.",
    )
    size = f"GPU KV cache size: {config.num_gpu_blocks * config.block_size:,} tokens"
    longest = config.max_model_len
    times = config.num_gpu_blocks * config.block_size / longest
    many = f"Maximum concurrency for {longest:,} tokens per request: {times:.2f}x"
    if is_since(version, "0.33"):
        yield -1.0, f"[kv_cache_utils.py:1146] {size}, {many}"
    else:
        yield -1.0, f"[kv_cache_utils.py:1087] {size}"
        yield -1.0, f"[kv_cache_utils.py:1091] {many}"


def _args(config: VllmConfig, wanted: LogOptions, ranks: int) -> dict[str, Any]:
    """Return the start options that are not defaults, by flag."""
    found: dict[str, Any] = {"model": "simulated"}
    if ranks > 1:
        found["data_parallel_size"] = ranks
    typed = flags(VllmConfig)
    for one in fields(config):
        value = getattr(config, one.name)
        always = one.name in ("max_num_seqs", "max_model_len", "num_gpu_blocks")
        if one.name in typed and (always or value != one.default):
            found[typed[one.name].removeprefix("--").replace("-", "_")] = value
    if wanted.requests:
        found["enable_log_requests"] = True
    if wanted.iterations:
        found["enable_logging_iteration_details"] = True
    return found


def _stats(record: RunRecord, version: str, rank: int) -> Iterator[LogEntry]:
    """Yield a line every ``STATS_INTERVAL_S`` s, unless two successive intervals were idle."""
    log = record.steps
    prompts, outputs = _prompts(record), _outputs(record)
    recent: deque[tuple[int, int]] = deque(maxlen=HIT_RATE_REQUESTS)
    preempted = sorted(at for life in record.requests.values() for at in life.preempted_at)
    busy_before, end = False, record.end + STATS_INTERVAL_S
    # A stalled engine continues to report waiting requests if it has computed at least one token.
    for tick in range(1, int(end // STATS_INTERVAL_S) + 2):
        low, high = (tick - 1) * STATS_INTERVAL_S, tick * STATS_INTERVAL_S
        part = 1 if computed_only(version) else 3
        prompt = sum(told[part] for told in prompts if low < told[0] <= high)
        recent.extend((hit, asked) for at, _, hit, asked in prompts if low < at <= high)
        output = bisect_right(outputs, high) - bisect_right(outputs, low)
        busy = prompt + output > 0
        if busy or busy_before:
            row = bisect_right(log.decided, high) - 1
            over = row < 0 or (high > log.end[-1] and record.engine_halt is None)
            running = 0 if over else log.running[row]
            waiting = 0 if over else log.waiting[row]
            usage = 0.0 if over else 1 - log.free_blocks[row] / record.num_blocks
            asked = sum(tokens for _, tokens in recent)
            hits = sum(hit for hit, _ in recent) / asked if asked else 0.0
            taken = bisect_right(preempted, high) - bisect_left(preempted, low)
            told = (
                prompt / STATS_INTERVAL_S,
                output / STATS_INTERVAL_S,
                running,
                waiting,
                usage,
                hits,
            )
            yield high, stats_line(*told, taken if is_since(version, "0.14") else 0, rank), SERVER
        busy_before = busy


def stats_line(
    prompt: float,
    output: float,
    running: int,
    waiting: int,
    usage: float,
    hits: float,
    preempted: int = 0,
    engine: int = 0,
) -> str:
    """Return the statistics line of an engine.

    ``prompt`` and ``output`` are in tokens per second. ``usage`` and ``hits`` are fractions from 0
    to 1. A negative ``engine`` means that the line covers -``engine`` engines.
    """
    more = f", Preemptions: {preempted}" if preempted else ""
    whose = f"Engine {engine:03d}" if engine >= 0 else f"{-engine} Engines Aggregated"
    return (
        f"[loggers.py:259] {whose}: Avg prompt throughput: {prompt:.1f} tokens/s, Avg "
        f"generation throughput: {output:.1f} tokens/s, Running: {running} reqs, Waiting: "
        f"{waiting} reqs{more}, GPU KV cache usage: {100 * usage:.1f}%, Prefix cache hit rate: "
        f"{100 * hits:.1f}%"
    )


def _prompts(record: RunRecord) -> list[tuple[float, int, int, int]]:
    """Return the end time (s) and the computed, cached and total tokens of each computed prompt."""
    found = []
    for life in record.requests.values():
        if life.first_token is not None:
            hit = life.chunks[0].context if life.chunks else 0
            prompt = life.request.prompt_tokens
            found.append((life.first_token, prompt - hit, hit, prompt))
    return sorted(found)


def _outputs(record: RunRecord) -> list[float]:
    """Return the emission times of all tokens, in order."""
    ends = record.steps.end
    found: list[float] = []
    for life in record.requests.values():
        for kind, first, last, emits in life.segments:
            if emits:
                found += ends[last : last + 1] if kind == "prefill" else ends[first : last + 1]
    return sorted(found)


def _requests(record: RunRecord, version: str) -> Iterator[LogEntry]:
    """Yield ``Received request`` lines, and an ``Aborted request`` line for each client that gave
    up.
    """
    for life in record.requests.values():
        request, name = life.request, request_name(life.request.id)
        params = f"SamplingParams(n=1, temperature=1.0, max_tokens={request.max_tokens})"
        if not is_since(version, "0.12"):
            ids = f"prompt_token_ids: {[1] * request.prompt_tokens}, prompt_embeds shape: None"
            text = f"prompt: '', params: {params}, {ids}, lora_request: None."
        else:
            text = f"params: {params}, lora_request: None."
        yield request.arrival, f"[logger.py:44] Received request {name}: {text}", SERVER
        if life.outcome in (Outcome.STARVED, Outcome.TIMED_OUT) and life.ended_at is not None:
            yield life.ended_at, f"[async_llm.py:500] Aborted request(s) {name}.", SERVER


def _iterations(record: RunRecord, version: str, rank: int, process: str) -> Iterator[LogEntry]:
    log = record.steps
    for row in range(len(log)):
        decodes, chunks = log.decode_seqs[row], log.prefill_seqs[row]
        elapsed = 1e3 * (log.end[row] - log.start[row])
        text = (
            f"Iteration({row}): {chunks} context requests, {log.prefill_tokens[row]} context "
            f"tokens, {decodes} generation requests, {decodes} generation tokens, iteration "
            f"elapsed time: {elapsed:.2f} ms"
        )
        if is_since(version, "0.27"):
            usage = 100 * (1 - log.free_blocks[row] / record.num_blocks)
            whole = f"Engine {rank:03d}: {text}, GPU KV cache usage: {usage:.1f}%"
            yield log.end[row], f"[loggers.py:199] {whole}", process
        else:
            yield log.end[row], f"[core.py:360] {text}", process
