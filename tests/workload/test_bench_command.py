"""Tests that command lines of serving benchmarks become workload sections."""

from __future__ import annotations

import math
from typing import Any

import pytest

from simkv.core.errors import InputError
from simkv.workload.formats.bench_command import read_bench_command


@pytest.mark.parametrize(
    ("command", "arrivals"),
    [
        (
            "vllm bench serve",
            {"num_prompts": 1000, "request_rate": math.inf, "prompt_tokens": 1024}
            | {"output_tokens": 128},
        ),
        (
            "python3 benchmark_serving.py --random-input-len 500 --random-output-len=50 "
            "--random-prefix-len 100 --random-range-ratio 0.2 --request-rate 4 --seed 3",
            {"num_prompts": 1000, "request_rate": 4, "seed": 3}
            | {"prompt_tokens": {"distribution": "uniform", "low": 500, "high": 700}}
            | {"output_tokens": {"distribution": "random", "len": 50, "range_ratio": 0.2}}
            | {"prefix_group": "shared", "prefix_tokens": 100},
        ),
        (
            "vllm bench serve --dataset-name prefix_repetition --num-prompts 50",
            {"num_prompts": 50, "request_rate": math.inf, "prompt_tokens": 512}
            | {"output_tokens": 128, "prefix_groups": 10, "prefix_tokens": 256},
        ),
        (
            "python -m sglang.bench_serving --dataset-name random --random-input 2000 "
            "--random-output 500 --random-range-ratio 0.5 --num-prompts 10 --request-rate inf",
            {"num_prompts": 10, "request_rate": math.inf}
            | {"prompt_tokens": {"distribution": "uniform", "low": 1000, "high": 2000}}
            | {"output_tokens": {"distribution": "uniform", "low": 250, "high": 500}},
        ),
    ],
)
def test_load(command: str, arrivals: dict[str, Any]) -> None:
    assert read_bench_command(command).workload == {"arrivals": arrivals}


def test_every_option_is_listed() -> None:
    found = read_bench_command(
        "vllm bench serve --max-concurrency 8 --port 1 --num-warmups 3 --goodput ttft:1 tpot:2"
    )
    assert found.workload["max_concurrency"] == 8
    assert found.used == ("--max-concurrency 8",)
    assert found.ignored == ("--port 1", "--goodput ttft:1 tpot:2")
    assert found.not_modelled == ("--num-warmups 3: warm-up requests are not simulated",)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("ls", "no benchmark"),
        ("vllm bench serve --request-rat 3", "did you mean '--request-rate'"),
        ("vllm bench serve --dataset-name sharegpt", "tokenizer"),
        (
            "python -m sglang.bench_serving",
            "--dataset-name sharegpt: simkv cannot determine the lengths",
        ),
        ("vllm bench serve --seed x", "expected a number"),
        ("vllm bench serve --seed", "expected a value"),
    ],
)
def test_bad_commands(command: str, message: str) -> None:
    with pytest.raises(InputError, match=f"--load: .*{message}"):
        read_bench_command(command)
