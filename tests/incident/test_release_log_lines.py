"""Tests with lines and spans written by the engines' own code: simkv's log writers write the same
form, and its readers read it.

``SIMKV_WHEELS`` names a folder with unpacked wheels; without it, these tests are skipped. Single
functions are loaded from their files, because the engines as a whole need a GPU; the objects that
these functions use are replaced.
"""

from __future__ import annotations

import ast
import json
import re
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import asdict, dataclass, is_dataclass
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from simkv.incident.emit.otel_writer import spans
from simkv.incident.emit.sglang_log_writer import sglang_log_lines
from simkv.incident.emit.vllm_log_writer import LogOptions, vllm_log_lines
from simkv.incident.source_reader import read_source
from simkv.metrics.run_result import RunResult
from simkv.metrics.scenario_runner import run_scenario
from simkv.scenario.scenario_loader import resolve_variants
from simkv.scenario.yaml_document import YamlDocument
from tests.incident.test_diagnose import HERE
from tests.incident.test_stats_line_formats import WHEELS

SGLANG = ("0.5.20", "0.5.22", "0.5.23")


def ran(**engine: Any) -> RunResult:
    """Return a run of a few requests; the last requests arrive while others decode."""
    requests = [{"prompt_tokens": 300, "output_tokens": 50, "arrival": 0.3 * i} for i in range(8)]
    document = {"name": "few", "workload": {"requests": requests}, "engine": engine}
    document["profile"] = "assumed-costs.json"
    scenario = next(iter(resolve_variants(YamlDocument(HERE / "few.yaml", document)).values()))
    return run_scenario(scenario, HERE, intervals=False)


def taken(wheel: str, file: str, name: str, **space: Any) -> Any:
    """Return a function or class of a wheel's file, loaded alone, with the given replacements of
    other names.
    """
    path = WHEELS / wheel / file
    if not path.is_file():
        pytest.skip(f"no {file} of {wheel}; SIMKV_WHEELS names the folder of wheels")
    wanted = [
        node
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name
    ]
    future = ast.parse("from __future__ import annotations").body
    exec(compile(ast.Module([*future, wanted[0]], []), str(path), "exec"), space)
    return space[name]


def skeleton(line: str) -> str:
    """Return a line without its prefix and its numbers."""
    text = re.sub(r"^.*?(?=Prefill batch|Decode batch|Engine \d|Iteration)", "", line, count=1)
    return re.sub(r"True|False", "B", re.sub(r"\d+(\.\d+)?", "N", text))


def logged() -> tuple[list[str], Any]:
    """Return a list of lines, and a logger that appends to this list."""
    lines: list[str] = []

    def info(text: str, *values: object) -> None:
        lines.append(text % values if values else text)

    return lines, SimpleNamespace(info=info)


def iterations(version: str) -> list[str]:
    """Return the lines that this version of vLLM logs for a step."""
    lines, logger = logged()
    details = SimpleNamespace(
        num_ctx_requests=2,
        num_ctx_tokens=600,
        num_generation_requests=3,
        num_generation_tokens=3,
        iteration_index=7,
        elapsed_ms=12.5,
        is_dummy=False,
        num_encoder_inputs=0,
    )
    if int(version.split(".")[1]) >= 27:
        file = "vllm/v1/metrics/loggers.py"
        log: Callable[..., None] = taken(
            f"vllm-{version}", file, "_log_iteration_details", logger=logger
        )
        about = SimpleNamespace(
            _log_prefix_for_engine=lambda index: f"Engine {index:03d}: ", kv_cache_device="GPU"
        )
        log(about, SimpleNamespace(iteration_details=details, kv_cache_usage=0.25), 0)
        return lines
    space: dict[str, Any] = {"logger": logger, "contextmanager": contextmanager, "time": time}
    space["compute_iteration_details"] = lambda _: details
    file = "vllm/v1/engine/core.py"
    log = taken(f"vllm-{version}", file, "log_iteration_details", **space)
    about = MagicMock(_iteration_index=7)
    with log(about, SimpleNamespace(total_num_scheduled_tokens=603)):  # type: ignore[attr-defined, func-returns-value]
        pass
    return lines


@pytest.mark.parametrize("version", ["0.14.0", "0.19.0", "0.24.0", "0.27.0", "0.33.0"])
def test_iterations_of_vllm(tmp_path: Path, version: str) -> None:
    lines = iterations(version)
    result = ran(name="vllm", variant=version)
    config: Any = result.scenario.engine
    ours = list(vllm_log_lines([result.record], config, LogOptions(iterations=True)))
    own = {skeleton(line) for line in ours if "Iteration(" in line}
    assert own == {skeleton(line) for line in lines}
    path = tmp_path / "vllm.log"
    path.write_text("".join(f"INFO 01-15 08:00:00 [x.py:1] {line}\n" for line in lines))
    steps = read_source(path).steps
    assert steps is not None
    row = steps.iloc[0]
    assert (row["prefill_seqs"], row["prefill_tokens"], row["decode_tokens"]) == (2, 600, 3)


def test_spans_of_vllm(tmp_path: Path) -> None:
    made: dict[str, Any] = {}
    names = taken("vllm-0.33.0", "vllm/tracing/utils.py", "SpanAttributes")
    trace = taken(
        "vllm-0.33.0",
        "vllm/v1/engine/output_processor.py",
        "do_tracing",
        SpanAttributes=names,
        SpanKind=SimpleNamespace(SERVER=2),
        extract_trace_context=lambda _: None,
        length_from_prompt_token_ids_or_embeds=lambda ids, _: len(ids),
        instrument_manual=lambda **told: made.update(told),
    )
    begin = 1.7e9
    stats = SimpleNamespace(
        arrival_time=begin,
        scheduled_ts=11.0,
        queued_ts=10.0,
        first_token_ts=11.5,
        last_token_ts=14.0,
        first_token_latency=1.5,
        num_generation_tokens=26,
    )
    state = SimpleNamespace(
        stats=stats,
        prompt_token_ids=[1] * 300,
        prompt_embeds=None,
        external_req_id="cmpl-1",
        top_p=1.0,
        max_tokens_param=64,
        temperature=1.0,
        n=1,
    )
    trace(
        None,
        SimpleNamespace(trace_headers=None),
        state,
        SimpleNamespace(iteration_timestamp=begin + 4),
    )
    result = ran(name="vllm", variant="0.33.0")
    first = json.loads(next(spans(result.record)))
    span = first["resourceSpans"][0]["scopeSpans"][0]["spans"][0]
    assert {pair["key"] for pair in span["attributes"]} == set(made["attributes"])
    assert (span["name"], span["kind"]) == (made["span_name"], made["kind"])
    kinds = {int: "intValue", float: "doubleValue", str: "stringValue"}
    span["attributes"] = [
        {"key": key, "value": {kinds[type(value)]: str(value) if type(value) is int else value}}
        for key, value in made["attributes"].items()
    ]
    span["startTimeUnixNano"] = str(made["start_time"])
    span["endTimeUnixNano"] = str(made["start_time"] + 4 * 10**9)
    path = tmp_path / "spans.jsonl"
    path.write_text(json.dumps(first) + "\n")
    requests = read_source(path).requests
    assert requests is not None
    row = requests.iloc[0]
    assert (row["prompt_tokens"], row["output_tokens"], row["max_tokens"]) == (300, 26, 64)
    assert (row["queue_ms"], row["ttft_ms"], row["e2e_ms"]) == (1000, 1500, 4000)


REPORTER = "sglang/srt/managers/scheduler_components/metrics_reporter.py"
POOL = "sglang/srt/managers/scheduler_components/pool_stats_observer.py"


def batches(version: str) -> list[str]:
    """Return the lines that this version of SGLang logs for a prefill and for decodes."""
    lines, logger = logged()
    wheel = f"sglang-{version}"
    usage = SimpleNamespace(
        is_hybrid_swa=False,
        is_hybrid_ssm=False,
        is_hisparse=False,
        full_num_used=1234,
        full_token_usage=0.25,
    )
    for name in ("get_prefill_usage_msg_parts", "get_decode_usage_msg_parts"):
        part = taken(wheel, POOL, name)
        setattr(usage, name, lambda part=part: part(usage))
    none = SimpleNamespace(language_only=False)
    space = {
        "logger": logger,
        "time": time,
        "LOG_FORWARD_ITERS": False,
        "ENABLE_METRICS_DEVICE_TIMER": False,
        "RECORD_STEP_TIME": False,
        "DisaggregationMode": SimpleNamespace(PREFILL=1, DECODE=2),
        "get_disagg": lambda: none,
        "get_server_args": lambda: none,
    }
    about = MagicMock(
        last_prefill_stats_tic=0.0,
        last_decode_stats_tic=0.0,
        num_generated_tokens=40,
        forward_ct_decode=40,
        decode_log_interval=40,
        enable_mfu_metrics=False,
        is_stats_logging_rank=True,
        current_scheduler_metrics_enabled=False,
        _graph_backend_label="cuda graph",
    )
    about.scheduler.pool_stats_observer.get_pool_stats = lambda: usage
    about.scheduler.waiting_queue = [1, 2]
    about.scheduler.disaggregation_mode = 0
    stats = MagicMock(
        num_new_seqs=3,
        log_input_tokens=700,
        log_hit_tokens=100,
        log_replay_tokens=0,
        num_pending_tokens=0,
    )
    stats.num_running_reqs.total = 5
    taken(wheel, REPORTER, "report_prefill_stats", **space)(about, None, stats, False)
    running = MagicMock(reqs=[1] * 8)
    taken(wheel, REPORTER, "report_decode_stats", **space)(about, True, running)
    return lines


@pytest.mark.parametrize("version", SGLANG)
def test_batches_of_sglang(tmp_path: Path, version: str) -> None:
    lines = batches(version)
    result = ran(name="sglang", variant=version)
    config: Any = result.scenario.engine
    ours = {
        skeleton(line) for line in sglang_log_lines(result.record, config) if " batch, " in line
    }
    assert ours == {skeleton(line) for line in lines}
    path = tmp_path / "sglang.log"
    path.write_text("".join(f"[2026-01-15 08:00:0{i}] {line}\n" for i, line in enumerate(lines)))
    found = read_source(path).series
    assert found is not None
    assert found["running"].tolist() == [8, 8]  # 5 and 3 new tokens; 8 decodes
    assert found["waiting"].tolist() == [2, 2]
    assert found["usage"].tolist() == [0.25, 0.25]


@dataclass
class Asked:
    """Used fields of SGLang's GenerateReqInput."""

    rid: str
    text: str | None
    input_ids: list[int]
    sampling_params: dict[str, Any]
    stream: bool


def plain(data: Any) -> Any:
    """Return the logged form of an object."""
    return asdict(data) if is_dataclass(data) and not isinstance(data, type) else data


@pytest.mark.parametrize("version", SGLANG)
def test_requests_of_sglang(tmp_path: Path, version: str) -> None:
    lines, logger = logged()
    wheel, file = f"sglang-{version}", "sglang/srt/utils/request_logger.py"
    log_json = taken(
        wheel, "sglang/srt/utils/log_utils.py", "log_json", json=json, datetime=datetime
    )
    space = {
        "log_json": lambda _, event, data: log_json([logger], event, data),
        "_extract_whitelisted_headers": lambda _: None,
        "_transform_data_for_logging": lambda data, *_: plain(data),
    }
    about = SimpleNamespace(
        log_requests=True,
        log_requests_level=3,
        log_requests_format="json",
        metadata=(1 << 30, None, None),
        targets=[logger],
        log_exceeded_ms=0,
    )
    asked = Asked("r1", None, [1] * 300, {"max_new_tokens": 50}, True)
    out = {
        "meta_info": {
            "id": "r1",
            "finish_reason": {"type": "length", "length": 50},
            "prompt_tokens": 300,
            "completion_tokens": 50,
            "cached_tokens": 100,
            "queue_time": 0.5,
            "request_received_ts": 1.7e9,
            "first_token_latency": 1.0,
            "e2e_latency": 2.0,
        }
    }
    taken(wheel, file, "log_received_request", **space)(about, asked)
    taken(wheel, file, "log_finished_request", **space)(about, asked, out)
    result = ran(name="sglang", variant=version)
    config: Any = result.scenario.engine
    ours = [line for line in sglang_log_lines(result.record, config) if '"event"' in line]
    for event, line in zip(("request.received", "request.finished"), lines, strict=True):
        own = json.loads(next(one for one in ours if event in one).partition("] ")[2])
        theirs = json.loads(line)
        assert own.keys() == theirs.keys()
        assert own["obj"].keys() <= theirs["obj"].keys()
    path = tmp_path / "sglang.log"
    for prefix in ("[2026-01-15 08:00:00] ", ""):  # on the console, and in a separate file
        path.write_text("".join(f"{prefix}{line}\n" for line in lines))
        requests = read_source(path).requests
        assert requests is not None
        row = requests.iloc[0]
        assert (row["prompt_tokens"], row["output_tokens"], row["cached_tokens"]) == (300, 50, 100)
        assert (row["queue_ms"], row["ttft_ms"], row["e2e_ms"]) == (500, 1000, 2000)
