"""Measure the stability of the packaged engines under a token budget, in the model of arXiv
2504.07347.

A step processes at most ``BUDGET`` tokens and always takes one second. A request computes its
prompt first, and one token per step after it. The step of the last prompt token emits the first
output token, so a request needs ``prompt + output - 1`` tokens. Memory is not limited.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import simpy

from simkv.core.request import Request
from simkv.costs.cost_profile import load_profile
from simkv.costs.simulated_executor import SimulatedExecutor
from simkv.scenario.scenario import Scenario
from simkv.schedulers.engine_registry import build_scheduler
from simkv.sim.client_loop import run_clients
from simkv.sim.engine import Engine
from simkv.sim.run_record import RequestRecord, RunRecord


@dataclass(frozen=True)
class Load:
    """Prompt length and the equally likely output lengths of requests, in tokens."""

    prompt: int
    outputs: tuple[int, ...]

    @property
    def tokens(self) -> float:
        """Mean number of tokens computed for a request."""
        return self.prompt + sum(self.outputs) / len(self.outputs) - 1


@dataclass(frozen=True)
class Setup:
    """An engine with a token budget: its title, and the name of its kind of batches in the
    paper.
    """

    title: str
    kind: str
    engine: dict[str, Any]


def setups(budget: int) -> list[Setup]:
    """Return the packaged engines with steps of at most ``budget`` tokens and sufficient memory for
    all requests.
    """
    vllm = {
        "name": "vllm",
        "max_num_batched_tokens": budget,
        "max_num_seqs": budget,
        "num_gpu_blocks": 100_000,
        "enable_prefix_caching": False,
    }
    sglang = {
        "name": "sglang",
        "chunked_prefill_size": budget,
        "max_prefill_tokens": budget,
        "max_running_requests": budget,
        "max_total_num_tokens": 1_600_000,
        "disable_radix_cache": True,
    }
    trtllm = {
        "name": "trtllm",
        "max_num_tokens": budget,
        "max_batch_size": budget,
        "max_tokens_in_paged_kv_cache": 1_600_000,
        "enable_block_reuse": False,
        "tokens_per_block": 1,  # chunks are whole blocks
        "enable_chunked_prefill": True,
    }
    fastdeploy = {
        "name": "fastdeploy",
        "max_num_batched_tokens": budget,
        "max_num_seqs": budget,
        "num_blocks": 100_000,
    }
    mistralrs = {
        "name": "mistralrs",
        "max_num_seqs": budget,
        "prefill_batch_max_seqs": budget,
        "prefill_batch_max_tokens": budget,
        "num_gpu_blocks": 50_000,
    }
    return [
        Setup("vLLM 0.33.0", "mixed", vllm),
        Setup("vLLM 0.11.0", "mixed", {**vllm, "variant": "0.11.0"}),
        Setup("SGLang 0.5.23", "prefill first", sglang),
        Setup("SGLang 0.5.23, mixed chunks", "mixed", {**sglang, "enable_mixed_chunk": True}),
        Setup("TensorRT-LLM", "mixed", trtllm),
        Setup(
            "TensorRT-LLM, static batches",
            "static",
            {**trtllm, "capacity_scheduler_policy": "STATIC_BATCH"},
        ),
        Setup("FastDeploy", "mixed", fastdeploy),
        Setup("mistral.rs, merged2250", "prefill first", mistralrs),
    ]


def make_requests(load: Load, arrivals: Sequence[float], seed: int) -> list[Request]:
    """Return requests with random output lengths that arrive at the given times (s)."""
    lengths = np.random.default_rng(seed).choice(load.outputs, size=len(arrivals))
    return [
        Request(
            id=number,
            prompt_tokens=load.prompt,
            max_tokens=int(output),
            arrival=float(arrival),
            output_tokens=int(output),
        )
        for number, (arrival, output) in enumerate(zip(arrivals, lengths, strict=True))
    ]


def simulate(engine: dict[str, Any], requests: Sequence[Request], until: float | None) -> RunRecord:
    """Simulate requests until a given time (s)."""
    scenario = Scenario.model_validate(
        {
            "name": "stability",
            "workload": {"burst": {"num_prompts": 1, "prompt_tokens": 1, "output_tokens": 1}},
            "engine": engine,
            "profile": "unit-step",
        }
    )
    executor = SimulatedExecutor(load_profile("unit-step"))
    loop = Engine(simpy.Environment(), build_scheduler(scenario.engine), executor)
    return run_clients(loop, list(requests), until)


def served_tokens(
    engine: dict[str, Any], load: Load, budget: int, steps: int, seed: int = 1
) -> float:
    """Return the mean number of served tokens per step while there are always waiting requests.

    Only requests that end after the first fifth of ``steps`` count, and recomputed tokens do not
    count.
    """
    count = int(2 * steps * budget / load.tokens)
    record = simulate(engine, make_requests(load, [0.0] * count, seed), float(steps))
    first = steps / 5
    ended = (life.request for end, life in ended_requests(record) if end >= first)
    return sum(one.prompt_tokens + one.output_tokens - 1 for one in ended) / (steps - first)


def ended_requests(record: RunRecord) -> list[tuple[float, RequestRecord]]:
    """Return the completely served requests, each with its end time (s)."""
    return [
        (life.ended_at, life)
        for life in record.requests.values()
        if life.ended_at is not None and life.tokens == life.request.output_tokens
    ]


def backlog_growth(
    engine: dict[str, Any], load: Load, rate: float, steps: int, seed: int = 1
) -> float:
    """Return the growth of the backlog in the second half of a run, as a fraction of the arrivals.

    Requests arrive at random at ``rate`` per step. The backlog is the number of unfinished
    requests.
    """
    gaps = np.random.default_rng(seed + 1000).exponential(1 / rate, size=int(2 * rate * steps))
    arrivals = [float(one) for one in np.cumsum(gaps) if one < steps]
    record = simulate(engine, make_requests(load, arrivals, seed), float(steps))
    ends = sorted(end for end, _ in ended_requests(record))

    def backlog(now: float) -> int:
        return int(np.searchsorted(arrivals, now)) - int(np.searchsorted(ends, now))

    arrived = int(np.searchsorted(arrivals, steps)) - int(np.searchsorted(arrivals, steps / 2))
    return (backlog(steps) - backlog(steps / 2)) / arrived
