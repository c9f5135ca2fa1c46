"""Measure the CPU time (in SimPy timeouts of the same run) and the memory of long sessions.

python benchmarks/session_speed.py [vllm sglang]

Each line is 1,000 sessions of 10, 20 or 40 turns on one replica with a prefix cache. All prompts
have about 30,000 tokens on average: they grow from a system prompt of 20,000 tokens to 40,000. Each
session draws one of 1,000 system prompts, so some sessions share one. In ``retained``, 16 sessions
are in progress, and their contexts fit into the cache. In ``evicted``, 64 are, and the contexts are
evicted between the turns. The target for 20 turns is at most 60 million timeouts and 1.5 GiB. Each
line is measured in a process of its own.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterator
from multiprocessing import get_context

import simpy
from speed_workloads import HERE

from simkv.costs.cost_profile import load_profile
from simkv.costs.simulated_executor import SimulatedExecutor
from simkv.schedulers.engine_registry import ENGINES
from simkv.sim.client_loop import run_clients
from simkv.sim.engine import Engine
from simkv.workload.workload_section import Workload, build_clients

SESSIONS, PREFIX, GROWTH, OUTPUT = 1000, 20_000, 20_000, 100
TURNS = (10, 20, 40)
#: Sessions in progress.
CASES = {"retained": 16, "evicted": 64}
#: Engines with a cache of 700,000 tokens.
CONFIGS = {
    "vllm": {"num_gpu_blocks": 43_750, "max_model_len": 65_536, "enable_prefix_caching": True},
    "sglang": {"max_total_num_tokens": 700_000},
}


def timeout_s(count: int = 1_000_000) -> float:
    """Return the CPU time of a SimPy timeout in seconds."""

    def process(env: simpy.Environment) -> Iterator[simpy.Event]:
        for _ in range(count):
            yield env.timeout(1)

    env = simpy.Environment()
    env.process(process(env))
    start = time.process_time()
    env.run()
    return (time.process_time() - start) / count


def measure(engine: str, case: str, turns: int) -> str:
    """Simulate a case and return its line."""
    sessions = {
        "num_sessions": SESSIONS,
        "request_rate": float("inf"),
        "turns": turns,
        "prefix_groups": SESSIONS,
        "prefix_tokens": PREFIX,
        "prompt_tokens": GROWTH // turns - OUTPUT,
        "output_tokens": OUTPUT,
        "tool_time": {"distribution": "exponential", "mean": 2},
    }
    workload = Workload.model_validate({"sessions": sessions, "max_sessions": CASES[case]})
    clients = build_clients(workload, None)
    spec = ENGINES[engine]
    scheduler = spec.build(spec.config(**CONFIGS[engine]))
    executor = SimulatedExecutor(load_profile("llama3-8b-class.json", HERE))
    server = Engine(simpy.Environment(), scheduler, executor)
    floor = timeout_s()
    start = time.process_time()
    run_clients(server, clients, None)
    cpu = time.process_time() - start
    floor = (floor + timeout_s()) / 2
    lives = server.record.requests.values()
    served = sum(life.outcome == "finished" for life in lives)
    prompts = sum(request.prompt_tokens for request in clients.requests)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    count = len(clients.requests)
    return (
        f"{engine:<8}{case:<10}{turns:>4} turns{served:>8,} of {count:,} requests"
        f"{prompts / count:>8,.0f} tokens{len(server.record.steps):>10,} steps{cpu:>8.1f} CPU s"
        f"{cpu / floor / 1e6:>7.1f} million timeouts{1e6 * cpu / count:>8,.0f} us per turn"
        f"{peak:>6.2f} GiB"
    )


def main() -> None:
    for engine in sys.argv[1:] or list(CONFIGS):
        for case in CASES:
            for turns in TURNS:
                with get_context("spawn").Pool(1) as pool:
                    print(pool.apply(measure, (engine, case, turns)), flush=True)


if __name__ == "__main__":
    main()
