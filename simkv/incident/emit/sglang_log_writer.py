"""Write a run as SGLang's log (0.5.23).

The log contains the start-up lines, one line per prefill batch, one line per 40 decode batches, and
received and finished requests as JSON. The options are ``--log-requests --log-requests-level 3``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields
from datetime import UTC, datetime
from typing import Any

from simkv.core.engine_flags import flags
from simkv.core.outcome import Outcome
from simkv.incident.emit.log_dates import RUN_EPOCH_S, format_time
from simkv.schedulers.sglang.config import SglangConfig
from simkv.schedulers.sglang.versions import RULES
from simkv.sim.run_record import RequestRecord, RunRecord

#: Value of ``decode_log_interval``, and the seconds until the engine is ready.
DECODE_LOG_INTERVAL, STARTUP_S = 40, 60.0


def sglang_log_lines(record: RunRecord, config: SglangConfig) -> Iterator[str]:
    """Yield the lines of the log in order of time."""
    lines = [*_start(config), *_batches(record), *_requests(record)]
    if record.engine_halt is not None and record.engine_halt.kind == "engine died":
        lines += _death(record)
    for at, text in sorted(lines, key=lambda line: line[0]):
        yield f"[{format_time(at, '%Y-%m-%d %H:%M:%S')}] {text}"


def _start(config: SglangConfig) -> Iterator[tuple[float, str]]:
    typed = flags(SglangConfig)
    args: dict[str, Any] = {"model_path": "simulated"}
    lacking = RULES[config.variant].lacks
    for one in fields(config):
        if one.name in lacking:
            continue
        value = getattr(config, one.name)
        if one.name in typed and value is not None:
            args[typed[one.name].removeprefix("--").replace("-", "_")] = value
    said = ", ".join(f"{name}={value!r}" for name, value in args.items())
    yield -STARTUP_S, f"server_args=ServerArgs({said})"
    yield (
        -1.0,
        f"max_total_num_tokens={config.max_total_num_tokens}, "
        f"chunked_prefill_size={config.chunked_prefill_size}, "
        f"max_prefill_tokens={config.max_prefill_tokens}, "
        f"max_running_requests={config.max_running_requests}, context_len=131072, "
        "available_gpu_mem=8.00 GB",
    )


def _batches(record: RunRecord) -> Iterator[tuple[float, str]]:
    log, decodes, since, tokens = record.steps, 0, 0.0, 0
    before = 0.0
    begun: dict[int, int] = {}
    cached: dict[int, int] = {}
    for life in record.requests.values():
        for chunk in life.chunks[:1]:
            begun[chunk.row] = begun.get(chunk.row, 0) + 1
            cached[chunk.row] = cached.get(chunk.row, 0) + chunk.context
    for row in range(len(log)):
        held = 1 - log.free_blocks[row] / record.num_blocks
        used = f"token usage: {held:.2f}, "
        at = log.end[row]
        if log.prefill_seqs[row]:
            rate = log.prefill_tokens[row] / (at - before) if at > before else 0.0
            before = at
            new = begun.get(row, 0)
            yield (
                log.start[row],
                f"Prefill batch, #new-seq: {log.prefill_seqs[row]}, #new-token: "
                f"{log.prefill_tokens[row]}, #cached-token: {cached.get(row, 0)}, {used}"
                f"#running-req: {max(log.running[row] - new, 0)}, #queue-req: {log.waiting[row]}, "
                f"#pending-token: 0, cuda graph: False, input throughput (token/s): {rate:.2f}",
            )
        if log.decode_seqs[row] and not log.prefill_seqs[row]:
            decodes += 1
            tokens += log.decode_seqs[row]
            if decodes % DECODE_LOG_INTERVAL == 0:
                yield (
                    at,
                    f"Decode batch, #running-req: {log.decode_seqs[row]}, #token: "
                    f"{round(held * record.num_blocks)}, {used}cuda graph: True, "
                    f"gen throughput (token/s): {tokens / max(at - since, 1e-9):.2f}, #queue-req: "
                    f"{log.waiting[row]}",
                )
                since, tokens = at, 0


def _requests(record: RunRecord) -> Iterator[tuple[float, str]]:
    for life in record.requests.values():
        request = life.request
        asked = {
            "rid": str(request.id).zfill(32),
            "obj": {
                "input_ids": [1] * request.prompt_tokens,
                "sampling_params": {"max_new_tokens": request.max_tokens},
                "stream": True,
            },
        }
        yield request.arrival, _event(request.arrival, "request.received", asked)
        out = _answer(record, life)
        if out is not None and life.ended_at is not None:
            short = asked | {"obj": {"sampling_params": {"max_new_tokens": request.max_tokens}}}
            told = short | {"out": {"meta_info": out}}
            yield life.ended_at, _event(life.ended_at, "request.finished", told)


def _answer(record: RunRecord, life: RequestRecord) -> dict[str, Any] | None:
    request, rid = life.request, str(life.request.id).zfill(32)
    if life.outcome in (Outcome.STARVED, Outcome.TIMED_OUT):
        return {"id": rid, "finish_reason": {"type": "abort", "message": "Abort in waiting queue"}}
    if life.outcome is not Outcome.FINISHED:
        return None
    begun = record.steps.start[life.segments[0].first]
    return {
        "id": rid,
        "finish_reason": {"type": "length", "length": life.tokens},
        "prompt_tokens": request.prompt_tokens,
        "completion_tokens": life.tokens,
        "cached_tokens": life.chunks[0].context if life.chunks else 0,
        "queue_time": begun - request.arrival,
        "request_received_ts": RUN_EPOCH_S + request.arrival,
        "first_token_latency": (life.first_token or 0.0) - request.arrival,
        "e2e_latency": (life.last_token or 0.0) - request.arrival,
    }


def _event(at: float, event: str, data: dict[str, Any]) -> str:
    time = datetime.fromtimestamp(RUN_EPOCH_S + at, UTC).replace(tzinfo=None).isoformat()
    return json.dumps({"timestamp": time, "event": event, **data})


def _death(record: RunRecord) -> Iterator[tuple[float, str]]:
    assert record.engine_halt is not None
    since = record.engine_halt.since
    yield since, f"Scheduler hit an exception: RuntimeError: {record.engine_halt.why.capitalize()}"
