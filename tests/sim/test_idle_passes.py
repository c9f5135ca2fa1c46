"""Tests that idle passes that only increase a counter are skipped, and nothing else changes."""

from __future__ import annotations

from typing import Any

import pytest
import simpy

from simkv.core.request import Request
from simkv.costs.cost_profile import load_profile
from simkv.costs.simulated_executor import SimulatedExecutor
from simkv.schedulers.engine_registry import build_scheduler
from simkv.schedulers.mistralrs.config import MistralrsConfig
from simkv.sim.client_loop import run_clients
from simkv.sim.engine import Engine
from simkv.sim.run_record import RunRecord
from tests.conftest import ROOT

FITS = Request(0, 100, 20, output_tokens=20)
NEVER = Request(1, 4000, 20, arrival=1.0, output_tokens=20)
SENT = {
    "alone": [NEVER],
    "given up": [FITS, Request(1, 4000, 20, arrival=1.0, output_tokens=20, timeout=0.0123)],
    "joined": [FITS, NEVER, Request(2, 60, 9, arrival=1.0171, output_tokens=9)],
    "twice": [NEVER, Request(2, 5000, 9, arrival=1.02, output_tokens=9)],
}


def served(
    variant: str, requests: list[Request], horizon: float | None, *, leaping: bool
) -> tuple[RunRecord, int]:
    """Return the record of a run and the number of calls to its scheduler."""
    config = MistralrsConfig(
        variant=variant,  # type: ignore[arg-type]
        num_gpu_blocks=100,
        block_size=16,
        waiting_timeout=5000,
    )
    executor = SimulatedExecutor(load_profile("llama3-8b-class.json", ROOT / "benchmarks"))
    engine = Engine(simpy.Environment(), build_scheduler(config), executor, leaping=leaping)
    calls, schedule = [0], engine.scheduler.schedule

    def counting() -> Any:
        calls[0] += 1
        return schedule()

    engine.scheduler.schedule = counting  # type: ignore[method-assign]
    return run_clients(engine, requests, horizon), calls[0]


@pytest.mark.parametrize("variant", ["bucketed", "merged2250", "pr2034july", "seed"])
@pytest.mark.parametrize("name", SENT)
@pytest.mark.parametrize("horizon", [None, 1.0307])
def test_leaps_over_idle_passes(variant: str, name: str, horizon: float | None) -> None:
    left_out, few = served(variant, SENT[name], horizon, leaping=True)
    looked_at, many = served(variant, SENT[name], horizon, leaping=False)
    assert left_out.idle_passes == looked_at.idle_passes
    assert (left_out.end, left_out.queue_heads) == (looked_at.end, looked_at.queue_heads)
    assert left_out.engine_halt == looked_at.engine_halt
    for i, life in looked_at.requests.items():
        other = left_out.requests[i]
        assert (other.outcome, other.ended_at) == (life.outcome, life.ended_at)
        assert (other.segments, other.received_at) == (life.segments, life.received_at)
    assert many <= 200 or few < many / 5
