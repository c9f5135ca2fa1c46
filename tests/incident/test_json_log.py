"""Tests of logs with one JSON object per line, from vLLM's formatter and container runtimes."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest

from simkv.incident.source_reader import read_source

PLAIN = [
    "vLLM server version 0.33.0, serving model simulated",
    "non-default args: {'model': 'simulated', 'max_num_seqs': 64}",
    "GPU KV cache size: 64,000 tokens, Maximum concurrency for 8,192 tokens per request: 7.81x",
    "Received request cmpl-1: params: SamplingParams(n=1, max_tokens=100), lora_request: None.",
    "Engine 000: Avg prompt throughput: 50.0 tokens/s, Avg generation throughput: 20.5 tokens/s, "
    "Running: 3 reqs, Waiting: 4 reqs, GPU KV cache usage: 25.0%, Prefix cache hit rate: 0.0%",
]
#: The attributes of ``JSON_FORMAT`` in vllm/logging_utils/formatter.py, and the fields that it
#: adds.
ATTRIBUTES = {"levelname": "INFO", "name": "vllm.v1", "processName": "MainProcess", "process": 7}


def as_text(at: int, message: str) -> str:
    return f"(APIServer pid=7) INFO 01-15 08:00:{at:02d} [a.py:1] {message}"


def by_vllm(at: int, message: str) -> str:
    told = {"asctime": f"2026-01-15 08:00:{at:02d},000", **ATTRIBUTES, "message": message}
    return json.dumps(told | {"vllm_process_name": "APIServer"})


def by_seconds(at: int, message: str) -> str:
    return json.dumps({"msg": message, "ts": 1768464000 + at})


def by_docker(at: int, message: str) -> str:
    when = f"2026-01-15T09:00:{at:02d}.5Z"  # the time of the runtime, on its own clock
    return json.dumps({"log": as_text(at, message) + "\n", "stream": "stderr", "time": when})


@pytest.mark.parametrize("form", [by_vllm, by_seconds, by_docker])
def test_json_log_is_read_like_the_text(tmp_path: Path, form) -> None:  # type: ignore[no-untyped-def]
    plain, other = tmp_path / "plain.log", tmp_path / "json.log"
    plain.write_text("".join(as_text(10 * i, line) + "\n" for i, line in enumerate(PLAIN)))
    other.write_text("".join(form(10 * i, line) + "\n" for i, line in enumerate(PLAIN)))
    first, second = read_source(plain), read_source(other)
    assert second.engine == "vllm"
    for name in ("series", "arrivals"):
        one, two = getattr(first, name), getattr(second, name)
        years = round((two["t_s"].iloc[0] - one["t_s"].iloc[0]) / 86400)  # the text has no year
        moved = two.assign(t_s=two["t_s"] - 86400 * years)
        pd.testing.assert_frame_equal(one, moved)
    settings = {name: stated.value for name, stated in second.settings.items()}
    assert settings == {name: stated.value for name, stated in first.settings.items()}
    assert settings["max_num_seqs"] == 64
    assert settings["kv_tokens"] == 64000
    assert second.settings["max_num_seqs"].where == "json.log:2"


def test_sglang_in_a_container(tmp_path: Path) -> None:
    path = tmp_path / "json.log"
    batch = (
        "[2026-01-15 08:00:01] Decode batch, #running-req: 5, #token: 100, token usage: 0.10, "
        "cuda graph: True, gen throughput (token/s): 50.00, #queue-req: 2"
    )
    path.write_text(
        json.dumps({"log": "[2026-01-15 08:00:00] server_args=ServerArgs(page_size=1)\n"})
        + "\n"
        + json.dumps({"log": batch + "\n"})
        + "\n{not JSON\n"
    )
    found = read_source(path)
    assert found.engine == "sglang"
    assert found.series is not None
    assert found.series["running"].tolist() == [5]
