"""Compare scheduling policies with the optimum of an integer program, on small instances of arXiv
2502.07115.

A request holds ``prompt + j`` tokens of the KV cache when it computes its output token j, all
requests in the cache advance by one token per step, and no request is preempted. The objective is
the total latency.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import simpy
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import lil_matrix

from simkv.core.request import Request
from simkv.costs.cost_profile import load_profile
from simkv.costs.simulated_executor import SimulatedExecutor
from simkv.scenario.custom.code_source import override_trust
from simkv.scenario.scenario import Scenario
from simkv.schedulers.engine_registry import build_scheduler
from simkv.sim.client_loop import run_clients
from simkv.sim.engine import Engine

MC_SF = Path(__file__).resolve().parent.parent / "examples" / "mc_sf.py"


@dataclass(frozen=True)
class Instance:
    """An instance: size of the KV cache in tokens, and requests as (arrival step, prompt tokens,
    output tokens).
    """

    memory: int
    requests: tuple[tuple[int, int, int], ...]


def draw_instance(seed: int, *, online: bool) -> Instance:
    """Sample a small instance like the instances of the paper.

    Requests arrive all at once or, with ``online``, over time.
    """
    random = np.random.default_rng(seed)
    memory = int(random.integers(8, 13))
    if online:
        rate = random.uniform(0.5, 1.5)
        arrivals = [step for step in range(6) for _ in range(random.poisson(rate))]
    else:
        arrivals = [0] * int(random.integers(5, 8))
    rows = []
    for arrival in arrivals:
        prompt = int(random.integers(1, 6))
        rows.append((arrival, prompt, int(random.integers(1, memory - prompt + 1))))
    return Instance(memory, tuple(rows))


def engines(memory: int) -> dict[str, dict[str, Any]]:
    """Return the compared engines.

    In the paper, the first output token also needs a token of KV.
    """
    return {
        "MC-SF": {
            "name": "mine",
            "file": str(MC_SF),
            "num_blocks": memory,
            "block_size": 1,
        },
        "vLLM 0.33.0": {
            "name": "vllm",
            "block_size": 1,
            "num_gpu_blocks": memory + 1,
            "max_model_len": memory + 2,
            "startup_check": False,
            "enable_prefix_caching": False,
            "async_scheduling": False,
        },
    }


def total_latency(instance: Instance, engine: dict[str, Any]) -> float:
    """Return the total latency in steps under the rules of an engine."""
    with override_trust(True):
        scenario = Scenario.model_validate(
            {
                "name": "optimum",
                "workload": {"burst": {"num_prompts": 1, "prompt_tokens": 1, "output_tokens": 1}},
                "engine": engine,
                "profile": "unit-step",
            }
        )
        scheduler = build_scheduler(scenario.engine)
    requests = [
        # One more prompt token, because the engines store no KV for the last output token.
        Request(
            id=number,
            prompt_tokens=prompt + 1,
            max_tokens=output,
            arrival=float(arrival),
            ignore_eos=True,
            output_tokens=output,
        )
        for number, (arrival, prompt, output) in enumerate(instance.requests)
    ]
    executor = SimulatedExecutor(load_profile("unit-step"))
    record = run_clients(Engine(simpy.Environment(), scheduler, executor), requests, None)
    ends = [life.ended_at for life in record.requests.values()]
    assert all(end is not None for end in ends)
    return sum(float(end or 0.0) for end in ends) - sum(row[0] for row in instance.requests)


def optimum(instance: Instance, known: float) -> float:
    """Return the smallest total latency of any schedule; ``known`` is the total latency of one
    schedule.

    ``x[i, t]`` is 1 if request i starts at step t; in step u, the request holds ``prompt + u - t +
    1`` tokens. In a schedule that is at least as good as the known schedule, no request waits
    longer than ``known`` steps.
    """
    longest = int(known) - sum(output for _, _, output in instance.requests)
    starts = [
        (i, t)
        for i, (arrival, _, _) in enumerate(instance.requests)
        for t in range(arrival, arrival + longest + 1)
    ]
    horizon = 1 + max(t + instance.requests[i][2] for i, t in starts)
    cost = [
        t + instance.requests[i][2] - instance.requests[i][0] for i, t in starts
    ]  # end minus arrival
    once = lil_matrix((len(instance.requests), len(starts)))
    held = lil_matrix((horizon, len(starts)))
    for column, (i, t) in enumerate(starts):
        _, prompt, output = instance.requests[i]
        once[i, column] = 1
        for step in range(t, t + output):
            held[step, column] = prompt + step - t + 1
    found = milp(
        cost,
        constraints=[
            LinearConstraint(once.tocsr(), 1, 1),
            LinearConstraint(held.tocsr(), -np.inf, instance.memory),
        ],
        integrality=np.ones(len(starts)),
        bounds=Bounds(0, 1),
        options={"time_limit": 120},
    )
    assert found.status == 0, found.message
    return float(round(found.fun))


def ratios(instance: Instance) -> dict[str, float]:
    """Return the total latency of each engine relative to the optimum."""
    latencies = {
        name: total_latency(instance, engine) for name, engine in engines(instance.memory).items()
    }
    best = optimum(instance, latencies["MC-SF"])
    return {name: latency / best for name, latency in latencies.items()}


def summary(values: Sequence[float]) -> tuple[float, float, int]:
    """Return the mean, the maximum, and the number of values equal to 1."""
    return sum(values) / len(values), max(values), sum(value == 1 for value in values)
