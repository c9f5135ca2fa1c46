"""Tests with lines of real servers, quoted in public issues.

The lines are from many versions and several ranks; some are garbled because two processes wrote at
once. All are read without an error.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from simkv.incident.evidence import Evidence
from simkv.incident.source_reader import read_source

_API = "(APIServer pid=387731) INFO 03-11 06:16:52 [loggers.py:257] Engine "
_MM = "MM cache hit rate: 0.0%"
#: By issue: the lines, and the expected rows with engine, running, waiting and usage.
STATS: dict[str, tuple[list[str], list[tuple[float, ...]]]] = {
    "vllm-project/vllm#36748 (0.14, eight ranks)": (
        [
            f"{_API}000: Avg prompt throughput: 16.5 tokens/s, Avg generation throughput: 1157.2 "
            "tokens/s, Running: 51 reqs, Waiting: 117 reqs, GPU KV cache usage: 100.0%, Prefix "
            f"cache hit rate: 70.0%, {_MM}",
            f"{_API}001: Avg prompt throughput: 0.0 tokens/s, Avg generation throughput: 809.3 "
            "tokens/s, Running: 31 reqs, Waiting: 108 reqs, GPU KV cache usage: 98.6%, Prefix "
            f"cache hit rate: 66.0%, {_MM}",
        ],
        [(0, 51, 117, 1.0), (1, 31, 108, 0.986)],
    ),
    "vllm-project/vllm#43295 (0.21)": (
        [
            "(APIServer pid=3646) INFO 05-19 10:13:31 [loggers.py:271] Engine 000: Avg prompt "
            "throughput: 12068.8 tokens/s, Avg generation throughput: 734.9 tokens/s, Running: 18 "
            "reqs, Waiting: 33 reqs, GPU KV cache usage: 87.7%, Prefix cache hit rate: 0.0%"
        ],
        [(0, 18, 33, 0.877)],
    ),
    "vllm-project/vllm#16361 (0.8)": (
        [
            "INFO 04-10 03:44:38 [loggers.py:87] Engine 000: Avg prompt throughput: 10.8 tokens/s, "
            "Avg generation throughput: 34.3 tokens/s, Running: 0 reqs, Waiting: 0 reqs, GPU KV "
            "cache usage: 0.1%, Prefix cache hit rate: 85.7%"
        ],
        [(0, 0, 0, 0.001)],
    ),
    "vllm-project/vllm#18674 (V0 of 0.9)": (
        [
            "INFO 05-25 06:50:29 [metrics.py:486] Avg prompt throughput: 0.0 tokens/s, Avg "
            "generation throughput: 15.5 tokens/s, Running: 1 reqs, Swapped: 0 reqs, Pending: 0 "
            "reqs, GPU KV cache usage: 0.0%, CPU KV cache usage: 0.1%.",
            "INFO 05-25 06:50:29 [metrics.py:502] Prefix cache hit rate: GPU: 0.00%, CPU: 90.00%",
        ],
        [(0, 1, 0, 0.0)],
    ),
    "vllm-project/vllm#6737 (0.4.2)": (
        [
            "INFO 07-24 09:55:30 metrics.py:334] Avg prompt throughput: 0.0 tokens/s, Avg "
            "generation throughput: 2136.3 tokens/s, Running: 247 reqs, Swapped: 0 reqs, Pending: "
            "740 reqs, GPU KV cache usage: 99.7%, CPU KV cache usage: 0.0%"
        ],
        [(0, 247, 740, 0.997)],
    ),
    "vllm-project/vllm#8299 (0.6, in a container)": (
        [
            "[2024-09-10T16:54:51Z] INFO 09-10 09:54:51 metrics.py:351] Avg prompt throughput: 5.4 "
            "tokens/s, Avg generation throughput: 4.0 tokens/s, Running: 2 reqs, Swapped: 0 reqs, "
            "Pending: 0 reqs, GPU KV cache usage: 0.0%, CPU KV cache usage: 0.0%."
        ],
        [(0, 2, 0, 0.0)],
    ),
    "sgl-project/sglang#30047 (NPU)": (
        [
            "[2026-07-04 04:31:27 TP0] Prefill batch, #new-seq: 12, #new-token: 43264, "
            "#cached-token: 0, full token usage: 0.20, mamba usage: 0.30, #running-req: 13, "
            "#queue-req: 85, #pending-token: 340001, npu graph: False, input throughput (token/s): "
            "14947.07"
        ],
        [(0, 25, 85, 0.2)],
    ),
    "sgl-project/sglang#36081 (0.5.18)": (
        [
            "[2026-08-23 09:05:37 TP0 EP0] Decode batch, #running-req: 1, #full token: 165376, "
            "full token usage: 0.02, #swa token: 768, swa token usage: 0.00, accept len: 5.30, "
            "accept rate: 0.86, cuda graph: True, gen throughput (token/s): 167.04, #queue-req: 0"
        ],
        [(0, 1, 0, 0.02)],
    ),
    "sgl-project/sglang#25960 (two processes in one line)": (
        [
            "[2026-05-28 02:59:59 TP0] Decode batch, #running-req: 45, #token: 44672, token "
            "usaccept rate: 0.32, npu graph: False, gen throughput (token/s): 863.65, #queue-req"
        ],
        [(0, 45, np.nan, np.nan)],
    ),
}


def log(tmp_path: Path, lines: list[str]) -> Evidence:
    """Return the evidence from a log with these lines."""
    path = tmp_path / "server.log"
    path.write_text("".join(f"{line}\n" for line in lines))
    return read_source(path)


@pytest.mark.parametrize("source", STATS)
def test_stats_lines(tmp_path: Path, source: str) -> None:
    lines, told = STATS[source]
    found = log(tmp_path, lines).series
    assert found is not None
    rows = found[["engine", "running", "waiting", "usage"]].to_numpy(float)
    assert rows == pytest.approx(np.array(told), nan_ok=True)


#: By issue: the lines, and the settings in them.
STARTS = {
    "vllm-project/vllm#13596": (
        [
            "INFO 02-19 23:56:55 kv_cache_utils.py:524] GPU KV cache size: 2,042,016 tokens",
            "INFO 02-19 23:56:55 kv_cache_utils.py:527] Maximum concurrency for 2,048 tokens per "
            "request: 997.08x",
        ],
        {"kv_tokens": 2042016},
    ),
    "vllm-project/vllm#12569": (
        [
            "INFO 01-30 03:18:12 gpu_model_runner.py:848] Loading model weights took 67.7229 GB",
            "INFO 01-30 03:19:14 kv_cache_utils.py:395] # GPU blocks: 1381",
        ],
        {"num_gpu_blocks": 1381},
    ),
    "vllm-project/vllm#39734": (
        [
            "(APIServer pid=1327189) INFO 04-15 07:22:41 [utils.py:299]        █     █     █▄   ▄█",
            "(APIServer pid=1327189) INFO 04-15 07:22:41 [utils.py:299]  ▄▄ ▄█ █     █     █ ▀▄▀ █"
            "  version 0.19.1rc1.dev301+g60995c05b",
            "(APIServer pid=1327189) INFO 04-15 07:22:41 [utils.py:299]   █▄█▀ █     █     █     █"
            "  model   google/gemma-4-31B-it",
        ],
        {"version": "0.19.1rc1.dev301+g60995c05b", "model": "google/gemma-4-31B-it"},
    ),
    "huggingface/trl#3310": (
        [
            "(EngineCore_1 pid=2095613) INFO 04-17 23:05:00 [core.py:61] Initializing a V1 LLM "
            "engine (v0.8.3) with config: model='/mnt/Model/Qwen/Qwen2.5-7B-Instruct', "
            "speculative_config=None, max_seq_len=102400, tensor_parallel_size=1, "
            "enable_prefix_caching=True, chunked_prefill_enabled=True",
        ],
        {"version": "0.8.3", "max_model_len": 102400, "enable_prefix_caching": True},
    ),
}


@pytest.mark.parametrize("source", STARTS)
def test_lines_of_a_start(tmp_path: Path, source: str) -> None:
    lines, told = STARTS[source]
    settings = log(tmp_path, lines).settings
    assert {name: settings[name].value for name in told} == told


def test_request_without_prompt_length(tmp_path: Path) -> None:
    """vllm-project/vllm#16361: the line has the prompt only as text."""
    found = log(
        tmp_path,
        [
            "INFO 04-10 03:44:50 [logger.py:39] Received request "
            "chatcmpl-67ed206b1edc4811911bcc917c0a0f72: prompt: '<s>[INST]Hello! Tell me something "
            "interesting.[/INST]', params: SamplingParams(n=1, temperature=0.7, max_tokens=8174, "
            "min_tokens=0, guided_decoding=None, extra_args=None), prompt_token_ids: None, "
            "lora_request: None, prompt_adapter_request: None."
        ],
    ).arrivals
    assert found is not None
    assert found[["max_tokens", "prompt_tokens"]].iloc[0].tolist() == [8174, 0]
