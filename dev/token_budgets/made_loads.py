"""Run requests on a device with known costs, in isolation and under load."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import simpy

from dev.token_budgets.known_devices import Device
from simkv.core.request import Request
from simkv.costs.simulated_executor import advance_load
from simkv.costs.sources.single_request import IsolatedRequests
from simkv.costs.step_load import StepLoad, count_attention_pairs
from simkv.metrics.run_metrics import e2e
from simkv.schedulers.engine_registry import build_scheduler
from simkv.schedulers.vllm.config import VllmConfig
from simkv.sim.client_loop import run_clients
from simkv.sim.engine import Engine

Cost = Callable[[StepLoad], float]

#: Mean lengths of prompts and outputs in tokens, and the number of requests of the load.
PROMPT, OUTPUT, REQUESTS = 900, 120, 80
#: Number of requests in isolation, the same as in the public records.
ALONE = 32
#: Offered load as a fraction of the device's capacity.
BUSY = 0.5


class ToldExecutor:
    """An executor whose step durations come from a function."""

    def __init__(self, cost: Cost) -> None:
        self._cost = cost

    def run(self, load: StepLoad) -> float:
        return self._cost(load)

    def forecast_steps(self, load: StepLoad, steps: int) -> list[float]:
        return [self._cost(advance_load(load, step)) for step in range(1, steps + 1)]

    def ran(self, load: StepLoad, seconds: Sequence[float]) -> None:  # noqa: ARG002
        return

    def idle(self) -> float:
        return 1e-4


def alone_on(device: Device, budget: int, seed: int = 0) -> IsolatedRequests:
    """Return the durations (s) of requests in isolation; prompts are computed in chunks of
    ``budget`` tokens.
    """
    random = np.random.default_rng(seed)
    prompts = np.exp(random.uniform(np.log(200), np.log(3500), ALONE)).astype(int)
    outputs = random.integers(20, 200, ALONE)
    prefill, decode = [], []
    for prompt, output in zip(prompts.tolist(), outputs.tolist(), strict=True):
        time = 0.0
        for start in range(0, prompt, budget):
            tokens = min(budget, prompt - start)
            last = start + tokens == prompt
            time += device.cost(
                StepLoad(1, tokens, start, 0, 0, count_attention_pairs(tokens, start), int(last))
            )
        prefill.append(time)
        steps = [device.cost(StepLoad(0, 0, 0, 1, prompt + n, 0, 1)) for n in range(1, output)]
        decode.append(sum(steps) / len(steps))
    none = np.zeros(ALONE)
    return IsolatedRequests(
        prompts.astype(float),
        outputs.astype(float),
        none,
        np.array(prefill),
        np.array(decode),
        none,
    )


def requests(rate: float, seed: int = 1) -> list[Request]:
    """Return requests with Poisson arrivals at ``rate`` (1/s) and log-normal lengths."""
    random = np.random.default_rng(seed)
    arrivals = np.cumsum(random.exponential(1.0, REQUESTS)) / rate
    prompts = np.clip(random.lognormal(np.log(PROMPT) - 0.32, 0.8, REQUESTS), 20, 4000).astype(int)
    outputs = np.clip(random.lognormal(np.log(OUTPUT) - 0.18, 0.6, REQUESTS), 5, 600).astype(int)
    rows = zip(arrivals.tolist(), prompts.tolist(), outputs.tolist(), strict=True)
    return [
        Request(id=n, prompt_tokens=p, max_tokens=o, arrival=a, output_tokens=o)
        for n, (a, p, o) in enumerate(rows)
    ]


def served(cost: Cost, budget: int, sent: Sequence[Request]) -> tuple[float, float]:
    """Return the mean E2E latency and the makespan (s) of requests on vLLM with this token budget
    and enough blocks.
    """
    env = simpy.Environment()
    config = VllmConfig(
        variant="0.11.0",
        num_gpu_blocks=60000,
        max_num_seqs=64,
        max_num_batched_tokens=budget,
        max_model_len=8192,
        enable_prefix_caching=False,
        async_scheduling=False,
    )
    record = run_clients(Engine(env, build_scheduler(config), ToldExecutor(cost)), list(sent), None)
    times = [e2e(record.requests[request.id]) or 0.0 for request in sent]
    return float(np.mean(times)), record.end


def load_for(device: Device, budget: int) -> list[Request]:
    """Return a load that keeps a device busy at this token budget, while its queue does not grow
    without limit.
    """
    together = [replace(request, arrival=0.0) for request in requests(1.0)]
    _, makespan = served(device.cost, budget, together)
    return requests(BUSY * REQUESTS / makespan)
