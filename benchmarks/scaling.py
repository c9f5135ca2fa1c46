"""Check that the work per request does not grow with size, for every engine and variant.

python benchmarks/scaling.py [--limit 0.05] [vllm sglang mistralrs fastdeploy trtllm]

Work is counted as executed lines of Python, and each round of a comprehension counts as a line, so
the results do not depend on the machine or its load. Loops in C (``sorted``, ``list``) are not
counted. Each printed line gives an exponent: the work per request grows with this power of one
size. The exponent is fitted between the smallest and the largest value, with all other sizes
constant. Exits with 1 if an exponent exceeds the limit.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from math import log
from types import FrameType
from typing import Any

import simpy

from simkv.core.request import Request
from simkv.costs.cost_profile import load_profile
from simkv.costs.simulated_executor import SimulatedExecutor
from simkv.scenario.fleet_section import LeastLoadedConfig
from simkv.schedulers.engine_registry import ENGINES
from simkv.sim.client_loop import SimulatedServer, run_clients
from simkv.sim.engine import Engine
from simkv.sim.fleet.fleet import Fleet
from simkv.sim.fleet.routers import build_router
from simkv.workload.clients import Clients
from simkv.workload.workload_section import Workload, build_clients

#: Large values that make sizes practically unlimited, by the settings of each engine.
ROOMY: dict[str, dict[str, Any]] = {
    "vllm": {"num_gpu_blocks": 40_000, "max_model_len": 4096},
    "sglang": {"max_total_num_tokens": 640_000},
    "mistralrs": {"num_gpu_blocks": 40_000},
    "fastdeploy": {"num_blocks": 40_000},
    "trtllm": {"max_tokens_in_paged_kv_cache": 640_000, "tokens_per_block": 16},
}
PROMPT, OUTPUT = 60, 20
#: Settings that enable an engine's priorities.
PRIORITIES = {"vllm": {"policy": "priority"}}


def config(engine: str, variant: str, seats: int, blocks: int | None = None, **more: Any) -> Any:
    """Return the engine's config with this number of slots, and with this number of blocks of 16
    tokens (default: more than enough).
    """
    spec = ENGINES[engine]
    knobs = {**ROOMY[engine], "variant": variant, spec.seats: seats, **more}
    if blocks:
        knobs[spec.memory] = 16 * blocks if spec.memory_in_tokens else blocks
    if engine == "vllm" and blocks:
        knobs["max_model_len"] = 16 * (blocks - 1)
    return spec.config(**knobs)


def burst(count: int, apart: float = 0.0, tiers: int = 1) -> list[Request]:
    """Return requests at intervals of ``apart`` seconds with the given number of priorities."""
    return [
        Request(i, PROMPT + i % 7, OUTPUT, i * apart, i % tiers, output_tokens=OUTPUT)
        for i in range(count)
    ]


def one(made: Any) -> Callable[[simpy.Environment, int], Engine]:
    """Return a function that builds a replica of the config."""
    profile = load_profile("unit-step")

    def make(env: simpy.Environment, rank: int) -> Engine:
        scheduler = ENGINES[made.name].build(made)
        return Engine(env, scheduler, SimulatedExecutor(profile), rank=rank)

    return make


def alone(made: Any) -> SimulatedServer:
    """Return a server with one replica of the config."""
    return one(made)(simpy.Environment(), 0)


def fleet(made: Any, replicas: int) -> SimulatedServer:
    """Return a fleet behind a router that reads loads."""
    router = build_router(LeastLoadedConfig(), lambda prompt: prompt.id)
    return Fleet(simpy.Environment(), [one(made)] * replicas, router)


def urgent(engine: str, variant: str) -> Any:
    """Return the engine's config with priorities."""
    return config(engine, variant, 4, **PRIORITIES[engine])


def heeds(engine: str, variant: str) -> bool:
    """Return whether the variant supports priorities; some releases reject them."""
    try:
        return engine in PRIORITIES and bool(urgent(engine, variant))
    except ValueError:
        return False


def sessions(turns: int, **more: int) -> Clients:
    """Return four sessions whose prompts contain all earlier turns."""
    lengths = {"prompt_tokens": 48, "output_tokens": OUTPUT, "request_rate": 1}
    made = {"sessions": {"num_sessions": 4, "turns": turns, **lengths, **more}}
    return build_clients(Workload.model_validate(made), None)


Sized = Callable[[str, str, int], tuple[SimulatedServer, "list[Request] | Clients"]]
#: Sessions without compaction. They have no limit, because the work of a turn grows with the number
#: of turns in its context: each is a segment of its prompt and, in SGLang, a node of the radix
#: tree.
TURNS_IN_CONTEXT = "turns in context"
#: Sizes that are varied, with their ranges.
AXES: dict[str, tuple[Sized, int, int]] = {
    "requests": (lambda e, v, n: (alone(config(e, v, 16)), burst(n, 2.0)), 100, 400),
    "waiting": (lambda e, v, n: (alone(config(e, v, 4)), burst(n)), 50, 400),
    "waiting for blocks": (lambda e, v, n: (alone(config(e, v, 16, 40)), burst(n)), 100, 1600),
    "running": (lambda e, v, n: (alone(config(e, v, n)), burst(n)), 25, 200),
    "replicas": (lambda e, v, n: (fleet(config(e, v, 16), n), burst(50 * n, 2.0 / n)), 2, 16),
    "blocks": (lambda e, v, n: (alone(config(e, v, 16, n)), burst(100)), 1000, 16_000),
    "turns": (
        lambda e, v, n: (alone(config(e, v, 16)), sessions(n, compact_at=400, compact_to=60)),
        10,
        80,
    ),
    TURNS_IN_CONTEXT: (lambda e, v, n: (alone(config(e, v, 16)), sessions(n)), 10, 40),
    "tiers": (lambda e, v, n: (alone(urgent(e, v)), burst(200, 0.0, n)), 2, 100),
}


def work(serving: Callable[[], object]) -> int:
    """Count executed lines of Python."""
    lines = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:  # noqa: ARG001
        nonlocal lines
        lines += event == "line"
        return trace

    sys.settrace(trace)
    try:
        serving()
    finally:
        sys.settrace(None)
    return lines


def per_request(sized: Sized, engine: str, variant: str, size: int) -> float:
    """Return the work per request for a given value of the size."""
    server, requests = sized(engine, variant, size)
    count = len(requests.requests if isinstance(requests, Clients) else requests)
    return work(lambda: run_clients(server, requests, None)) / count


def exponent(sized: Sized, engine: str, variant: str, small: int, large: int) -> float:
    """Return the growth exponent of the work per request."""
    before, after = (per_request(sized, engine, variant, size) for size in (small, large))
    return log(after / before) / log(large / small)


def main() -> int:
    words = sys.argv[1:]
    limit = float(words.pop(words.index("--limit") + 1)) if "--limit" in words else 0.05
    names = [word for word in words if not word.startswith("-")] or list(ENGINES)
    over = 0
    for name in names:
        for variant in ENGINES[name].distinct_variants:
            found = {
                axis: exponent(sized, name, variant, small, large)
                for axis, (sized, small, large) in AXES.items()
                if axis != "tiers" or heeds(name, variant)
            }
            grown = [
                axis for axis, power in found.items() if power > limit and axis != TURNS_IN_CONTEXT
            ]
            over += len(grown)
            said = ", ".join(f"{axis} {power:+.2f}" for axis, power in found.items())
            print(f"{name} {variant}: {said}{'  GROWS' if grown else ''}", flush=True)
    return int(over > 0)


if __name__ == "__main__":
    sys.exit(main())
