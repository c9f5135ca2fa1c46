"""The workloads of the speed measurements, each on one replica with vLLM's rules."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import simpy

from simkv.core.request import Request
from simkv.costs.cost_profile import load_profile
from simkv.costs.simulated_executor import SimulatedExecutor
from simkv.scenario.fleet_section import LeastLoadedConfig
from simkv.schedulers.engine_registry import build_scheduler
from simkv.schedulers.vllm.config import VllmConfig
from simkv.sim.engine import Engine
from simkv.sim.fleet.fleet import Fleet
from simkv.sim.fleet.routers import build_router
from simkv.workload.workload_section import Workload, generate_requests

HERE = Path(__file__).parent
TRACES = HERE.parent.parent / "shared" / "workloads"


@dataclass(frozen=True)
class Case:
    """A workload on one replica; with ``stepping``, it is also run without leaping."""

    name: str
    workload: dict[str, object]
    config: VllmConfig
    stepping: bool = True

    @property
    def missing(self) -> str | None:
        """Return the trace that the case needs if it is missing, else None."""
        trace = self.workload.get("trace")
        return str(trace) if trace and not Path(str(trace)).is_file() else None

    def requests(self) -> list[Request]:
        """Return the requests in order of arrival."""
        return generate_requests(Workload.model_validate(self.workload), None)

    def engine(self, *, leaping: bool = True) -> Engine:
        """Return a new replica; ``leaping`` enables leaps."""
        executor = SimulatedExecutor(load_profile("llama3-8b-class.json", HERE))
        return Engine(simpy.Environment(), build_scheduler(self.config), executor, leaping=leaping)


def poisson(count: int, rate: float) -> dict[str, object]:
    """Return a workload with Poisson arrivals and log-normal lengths with means of 512 and 256
    tokens.
    """
    return {
        "arrivals": {
            "num_prompts": count,
            "request_rate": rate,
            "prompt_tokens": {"distribution": "lognormal", "mean": 512},
            "output_tokens": {"distribution": "lognormal", "mean": 256},
        }
    }


def vllm(blocks: int, **knobs: object) -> VllmConfig:
    """Return a vLLM engine with at most 256 sequences, by default without prefix caching."""
    usual = {
        "num_gpu_blocks": blocks,
        "max_num_seqs": 256,
        "max_num_batched_tokens": 8192,
        "max_model_len": 8192,
        "enable_prefix_caching": False,
        "async_scheduling": False,
    }
    return VllmConfig(**{**usual, **knobs})  # type: ignore[arg-type]


def make_fleet(replicas: int) -> Fleet:
    """Return a fleet of the replicas of W1, behind a router that reads loads."""
    profile = load_profile("llama3-8b-class.json", HERE)

    def make(env: simpy.Environment, rank: int) -> Engine:
        return Engine(env, build_scheduler(vllm(16_000)), SimulatedExecutor(profile), rank=rank)

    router = build_router(LeastLoadedConfig(), lambda prompt: prompt.id)
    return Fleet(simpy.Environment(), [make] * replicas, router)


#: The replica serves about 42 requests/s of W1, so 34 requests/s is a load of 80 %.
CASES = (
    Case("w1", poisson(10_000, 34), vllm(16_000)),
    Case("w1-async", poisson(10_000, 34), vllm(16_000, async_scheduling=True)),
    Case("w1-100k", poisson(100_000, 34), vllm(16_000), stepping=False),
    Case("w2", poisson(10_000, 60), vllm(4_000)),
    Case(
        "w3-azure",
        {"trace": str(TRACES / "azure-2023-conv.csv.gz")},
        vllm(16_000, max_model_len=16_384),
    ),
    Case(
        "w3-mooncake",
        {"trace": str(TRACES / "mooncake-conversation.jsonl.gz"), "rate_scale": 0.1},
        vllm(60_000, max_model_len=131_072, enable_prefix_caching=True),
    ),
    Case("w4", poisson(1_000_000, 34), vllm(16_000), stepping=False),
)
